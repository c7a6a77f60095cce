r"""RandAugment over a whole batch: every image has its own draw, every operation runs once.

RandAugment (Cubuk et al., 2020) changes an image by a few operations picked at random. Image by image that holds
training up; with one pick a batch it is another method. The way out: draws are made on the CPU, where looking at
them costs nothing, so which images drew an operation is known, as tensors of indices and their lengths, before the
batch is touched. An operation selects its images, changes them together and puts them back. An image is touched by
what it drew alone, no shape depends on what lies on the device, and nothing is read back from there.

What an operation does follows from its *setting*: which operation, magnitude and sign. Settings are few, so all that
follows from the setting alone comes from tables, looked up on the device. There are three kinds of operations:

* a *move* (rotate, shear, translate) copies to pixel (x, y) the source pixel

      (a_0 x + a_1 y + a_2,  a_3 x + a_4 y + a_5),

  black where that is outside of the image. The six numbers have 16 binary digits after the point, as in PIL when it
  takes the nearest neighbour: the very same pixels come out;
* a *tone* (autocontrast, equalize, contrast, brightness, posterize, solarize) replaces the values of a channel, by a
  table of 256 bytes an image and channel;
* a *blend* with factor f of the image v and a duller one d is d + f (v - d), truncated: d is the grey image
  (color), the smoothed one (sharpness), the mean grey (contrast, a tone) or black (brightness, a tone).

Every result is, byte for byte, that of ``PIL.ImageOps``, ``PIL.ImageEnhance`` or ``PIL.Image.transform``: integers
are used where PIL has integers, or where they can be shown to give the same, and its floating-point type and order
elsewhere. (A PIL compiled to fuse multiplications and additions may miss by one grey level in a blend.)

The pool is FixMatch's (Sohn et al., 2020), the ranges are those of its paper's appendix, cut into magnitudes
m = 1, ..., 10 in the way of the widely used program in PyTorch:

==========================================  =================================================================
operation                                   strength
==========================================  =================================================================
identity, autocontrast, equalize            none
rotate                                      3 m degrees, either way
shear-x, shear-y                            0.03 m, either way
translate-x, translate-y                    0.03 m of the side in whole pixels, either way
contrast, brightness, color, sharpness      f = 0.05 + 0.09 m: duller, never more than the original
posterize                                   4 + floor(0.4 m) bits are kept
solarize                                    values from 256 - floor(25.6 m) on are inverted
==========================================  =================================================================

Each operation of an image is drawn uniformly from the pool, with replacement, its magnitude uniformly from
1, ..., ``magnitude``, its sign by a coin. Another coin decides whether it is applied. Where published programs differ:

* both the original one in TensorFlow and the one in PyTorch leave the largest magnitude out, because their integers
  exclude the upper end: with m = 10 they draw 1, ..., 9. ``magnitude=9`` is that; the default reaches the ends of the
  printed ranges;
* the original has f = 0.1 + 0.18 m, so it also goes beyond the original image, keeps 4 - floor(0.4 m) bits,
  translates by m pixels whatever the size, and fills what a move uncovers with mid-grey instead of black.

An image of one channel is its own grey image, so color leaves it alone.

Shapes: N images, H height, W width, P = H W pixels, C channels (1 or 3), S operations an image, M moves, i.e. settings
of them, G images of a group, i.e. of those that drew the same kind of operation, B = H W C bytes of an image.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_MAGNITUDE = 10


class Setting(NamedTuple):
    """An operation and how strongly it is applied."""

    operation: str
    magnitude: int  # 1..LARGEST_MAGNITUDE
    sign: int  # 1 or -1, for moves alone


def _rotate(magnitude: int, sign: int, height: int, width: int) -> tuple[float, ...]:
    angle = -math.radians(sign * int(30 * magnitude / 10) % 360)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = width / 2, height / 2
    return cos, sin, cos * -x + sin * -y + x, -sin, cos, -sin * -x + cos * -y + y


def _shear_x(magnitude: int, sign: int, height: int, width: int) -> tuple[float, ...]:
    return 1, sign * (0.3 * magnitude / 10), 0, 0, 1, 0


def _shear_y(magnitude: int, sign: int, height: int, width: int) -> tuple[float, ...]:
    return 1, 0, 0, sign * (0.3 * magnitude / 10), 1, 0


def _translate_x(magnitude: int, sign: int, height: int, width: int) -> tuple[float, ...]:
    return 1, 0, sign * int(0.3 * magnitude / 10 * width), 0, 1, 0


def _translate_y(magnitude: int, sign: int, height: int, width: int) -> tuple[float, ...]:
    return 1, 0, 0, 0, 1, sign * int(0.3 * magnitude / 10 * height)


def _brightness(magnitude: int) -> Tensor:
    return (_factor(magnitude) * _values()).to(torch.uint8)


def _posterize(magnitude: int) -> Tensor:
    dropped = 8 - (4 + int(4 * magnitude / 10))
    return _values() >> dropped << dropped


def _solarize(magnitude: int) -> Tensor:
    threshold = 256 - int(256 * magnitude / 10)
    return _values().where(_values() < threshold, 255 - _values())


def _factor(magnitude: int) -> float:
    return 0.9 * magnitude / 10 + 0.05


_MOVES: dict[str, Callable[[int, int, int, int], tuple[float, ...]]] = {
    "rotate": _rotate,
    "shear-x": _shear_x,
    "shear-y": _shear_y,
    "translate-x": _translate_x,
    "translate-y": _translate_y,
}
_CONSTANT_TONES: dict[str, Callable[[int], Tensor]] = {
    "brightness": _brightness,
    "posterize": _posterize,
    "solarize": _solarize,
}
_TONES: tuple[str, ...] = ("autocontrast", "equalize", "contrast", *_CONSTANT_TONES)
# Operations that run together are neighbours: when images are sorted by operation, those of a kind are a slice.
OPERATIONS: tuple[str, ...] = ("identity", *_MOVES, *_TONES, "color", "sharpness")
SETTINGS: tuple[Setting, ...] = tuple(
    Setting(operation, magnitude, sign)
    for operation in OPERATIONS
    for magnitude in range(1, LARGEST_MAGNITUDE + 1)
    for sign in (1, -1)
)

_SETTINGS_EACH = len(SETTINGS) // len(OPERATIONS)


@dataclass(frozen=True, eq=False)
class OperationDraw:
    """Which operations the images undergo, one after another, and how to line the images up for each."""

    setting: Tensor  # (N, S) indices into SETTINGS
    line: Tensor  # (S, N) row s: the s-th settings, sorted
    order: (
        Tensor  # (S + 1, N) row s: where in the line before the images of line s stand; the last one undoes it all
    )
    counts: tuple[tuple[int, ...], ...]  # for each s, how many images drew each of OPERATIONS

    @classmethod
    def plan(cls, setting: Tensor) -> OperationDraw:
        """Line the images up, given their settings (N, S) on the CPU."""
        stand = torch.arange(len(setting))
        lines, orders, counts = [setting.new_empty(0, len(setting))], [], []
        for setting_N in setting.unbind(1):
            line, order = setting_N.index_select(0, stand).sort(stable=True)
            stand = stand.index_select(0, order)
            lines.append(line.unsqueeze(0))
            orders.append(order)
            counts.append(tuple(torch.bincount(line // _SETTINGS_EACH, minlength=len(OPERATIONS)).tolist()))
        return cls(setting, torch.cat(lines), torch.stack([*orders, stand.argsort()]), tuple(counts))

    def __len__(self) -> int:
        return len(self.setting)

    def __getitem__(self, rows: slice | Tensor) -> OperationDraw:
        """Select images, on the CPU: they are lined up anew, so the settings are looked at."""
        if self.setting.device.type != "cpu":
            raise ValueError(
                f"rows of a draw are selected before it leaves the CPU, this one is on {self.setting.device}"
            )
        return self.plan(self.setting[rows])

    def to(self, device: torch.device | str, non_blocking: bool = False) -> OperationDraw:
        """Return the same draw on another device."""
        return OperationDraw(
            self.setting.to(device, non_blocking=non_blocking),
            self.line.to(device, non_blocking=non_blocking),
            self.order.to(device, non_blocking=non_blocking),
            self.counts,
        )


def draw_operations(n: int, generator: torch.Generator, operations: int = 2, magnitude: int = 10) -> OperationDraw:
    """Draw ``operations`` settings for each of n images, with magnitudes from 1 to ``magnitude``.

    >>> draw = draw_operations(2, torch.Generator().manual_seed(0), magnitude=5)
    >>> [[SETTINGS[i].operation for i in row] for row in draw.setting.tolist()]
    [['identity', 'identity'], ['sharpness', 'identity']]
    """
    if operations < 0:
        raise ValueError(f"operations must be how many an image undergoes, 0 or more, got {operations}")
    if not 1 <= magnitude <= LARGEST_MAGNITUDE:
        raise ValueError(f"magnitude must be one of 1 to {LARGEST_MAGNITUDE}, got {magnitude}")
    lots = _lots(magnitude)
    drawn = torch.randint(len(lots), (n, operations), generator=generator)
    return OperationDraw.plan(lots.take(drawn))


@lru_cache(maxsize=LARGEST_MAGNITUDE)
def _lots(magnitude: int) -> Tensor:
    """Return what is drawn from: every setting up to the magnitude, and for each the identity in its place."""
    settings = [i for i, setting in enumerate(SETTINGS) if setting.magnitude <= magnitude]
    identities = [SETTINGS.index(Setting("identity", 1, 1))] * len(settings)
    with torch.inference_mode(False):
        return torch.tensor(settings + identities)


def randaugment(images_NHWC: Tensor, draw: OperationDraw) -> Tensor:
    """Return the uint8 images after the operations that were drawn."""
    n, height, width, channels = images_NHWC.shape
    shape = (height, width, channels)
    tables = _tables(shape, images_NHWC.device)
    images_NB = images_NHWC.reshape(n, height * width * channels)
    for s, counts in enumerate(draw.counts):
        images_NB = images_NB.index_select(0, draw.order[s])
        starts = (0, *accumulate(counts))
        for operations, change in _CHANGES.items():
            first = OPERATIONS.index(operations[0])
            last = first + len(operations)
            start, stop = starts[first], starts[last]
            if start < stop:
                group_GB = images_NB[start:stop]
                group = _Group(group_GB, shape, draw.line[s, start:stop], counts[first:last], tables)
                group_GB.copy_(change(group))
    return images_NB.index_select(0, draw.order[-1]).view(images_NHWC.shape)


class _Tables(NamedTuple):
    """What follows from a setting and the size of images."""

    source: Tensor  # (settings of moves, B) int32: where a byte comes from, B for black
    tone: Tensor  # (SETTINGS, 256) uint8: the tones that do not look at the image, zeros elsewhere
    factor: Tensor  # (SETTINGS,) float32: f
    first: Tensor  # (B,) int16: where in tables (C, 256) that of a byte's channel begins


class _Group(NamedTuple):
    """Images that drew operations of a kind, lined up by operation."""

    bytes_GB: Tensor
    shape: tuple[int, int, int]  # H, W, C
    setting_G: Tensor
    counts: tuple[int, ...]  # how many images drew each operation of the kind
    tables: _Tables


@lru_cache(maxsize=8)
def _tables(shape: tuple[int, int, int], device: torch.device) -> _Tables:
    height, width, channels = shape
    with torch.inference_mode(False):  # the tables outlive the mode in which they happen to be made
        moves = [_MOVES[name](m, sign, height, width) for name, m, sign in SETTINGS if name in _MOVES]
        tone = torch.zeros(len(SETTINGS), 256, dtype=torch.uint8)
        for row, (operation, magnitude, _) in enumerate(SETTINGS):
            if operation in _CONSTANT_TONES:
                tone[row] = _CONSTANT_TONES[operation](magnitude)
        factor = torch.tensor([_factor(setting.magnitude) for setting in SETTINGS])
        first = (torch.arange(height * width * channels) % channels * 256).short()
        tables = (_sources(moves, height, width, channels), tone, factor, first)
        return _Tables(*(table.to(device) for table in tables))


def _sources(moves: list[tuple[float, ...]], height: int, width: int, channels: int) -> Tensor:
    """Return the source of each byte, computed as PIL does: for the centre of a pixel, in units of 2^-16."""
    a_6 = torch.tensor(moves, dtype=torch.float64).t()
    centred_6 = torch.stack(
        [a_6[0], a_6[1], a_6[2] + a_6[0] * 0.5 + a_6[1] * 0.5, a_6[3], a_6[4], a_6[5] + a_6[3] * 0.5 + a_6[4] * 0.5]
    )
    b_6M11 = (centred_6 * 65536 + 0.5).floor().long().view(6, -1, 1, 1)
    x_W, y_H1 = torch.arange(width), torch.arange(height).unsqueeze(1)
    x_MHW = (b_6M11[0] * x_W + b_6M11[1] * y_H1 + b_6M11[2]) >> 16
    y_MHW = (b_6M11[3] * x_W + b_6M11[4] * y_H1 + b_6M11[5]) >> 16
    inside_MHW = (x_MHW >= 0) & (x_MHW < width) & (y_MHW >= 0) & (y_MHW < height)
    byte_MHWC = (y_MHW * width + x_MHW).unsqueeze(3) * channels + torch.arange(channels)
    return byte_MHWC.where(inside_MHW.unsqueeze(3), height * width * channels).flatten(1).int()


def _move(group: _Group) -> Tensor:
    bytes_GB, _, setting_G, _, tables = group
    before = OPERATIONS.index(next(iter(_MOVES))) * _SETTINGS_EACH
    source_GB = tables.source.index_select(0, setting_G - before)
    black_G1 = bytes_GB.new_zeros(len(bytes_GB), 1)
    return torch.cat([bytes_GB, black_G1], 1).gather(1, source_GB.long())


def _tone(group: _Group) -> Tensor:
    """Look the bytes up in tables (G, C, 256), made in the order of ``_TONES``."""
    bytes_GB, (height, width, channels), setting_G, counts, tables = group
    sizes = [*counts[:3], sum(counts[3:])]
    stretched, flattened, faded, _ = bytes_GB.view(-1, height * width, channels).split(sizes)
    _, _, fading, constant = setting_G.split(sizes)
    entry_GB = bytes_GB.short().add_(tables.first).long()  # added as short numbers: half the time on a CPU
    tone_GCV = torch.cat(
        [
            _autocontrast(stretched),
            _equalize(flattened, entry_GB[sizes[0] : sizes[0] + sizes[1]]),
            _contrast(faded, tables.factor.index_select(0, fading)),
            tables.tone.index_select(0, constant).unsqueeze(1).expand(-1, channels, -1),
        ]
    )
    return tone_GCV.view(len(bytes_GB), -1).gather(1, entry_GB)


def _autocontrast(values_GPC: Tensor) -> Tensor:
    """Stretch the values between the least and the largest one to 0..255."""
    low_GC1 = values_GPC.amin(1).unsqueeze(2).double()
    range_GC1 = values_GPC.amax(1).unsqueeze(2) - low_GC1
    # Not 255 / range: torch makes that 255 times a reciprocal, rounded twice.
    scale_GC1 = torch.full_like(range_GC1, 255) / range_GC1.clamp(min=1)
    values_V = _values(values_GPC.device)
    stretched_GCV = (values_V * scale_GC1 - low_GC1 * scale_GC1).clamp_(0, 255).to(torch.uint8)
    return stretched_GCV.where(range_GC1 > 0, values_V)


def _equalize(values_GPC: Tensor, entry_GB: Tensor) -> Tensor:
    """Make the histogram flat, as far as a table can: a value becomes its rank over the mean frequency."""
    g, _, channels = values_GPC.shape
    frequency_GCV = (
        torch.zeros(g, channels * 256, dtype=torch.int64, device=entry_GB.device)
        .scatter_add_(1, entry_GB, torch.ones_like(entry_GB))
        .view(g, channels, 256)
    )
    below_GCV = frequency_GCV.cumsum(2).sub_(frequency_GCV)
    step_GC1 = below_GCV.gather(2, values_GPC.amax(1).long().unsqueeze(2)) // 255
    # In double precision, truncated: the quotient of integers is exact enough, and found four times as fast.
    flat_GCV = ((below_GCV + step_GC1 // 2).double() / step_GC1.clamp(min=1)).clamp_(max=255).to(torch.uint8)
    return flat_GCV.where(step_GC1 > 0, _values(entry_GB.device))


def _contrast(values_GPC: Tensor, factor_G: Tensor) -> Tensor:
    """Blend with the mean of the grey image, rounded."""
    _, pixels, channels = values_GPC.shape
    total_G = _grey(_planes(values_GPC)).sum(1, dtype=torch.float64)
    mean_G11 = (total_G / pixels + 0.5).floor_().float().view(-1, 1, 1)
    tone_G1V = _blend(mean_G11, _values(values_GPC.device).float(), factor_G.view(-1, 1, 1))
    return tone_G1V.expand(-1, channels, -1)


def _color(group: _Group) -> Tensor:
    bytes_GB, (height, width, channels), setting_G, _, tables = group
    if channels == 1:
        return bytes_GB
    planes_GCP = _planes(bytes_GB.view(-1, height * width, channels))
    factor_G11 = tables.factor.index_select(0, setting_G).view(-1, 1, 1)
    blended_GCP = _blend(_grey(planes_GCP).unsqueeze(1), planes_GCP, factor_G11)
    return blended_GCP.transpose(1, 2).reshape(bytes_GB.shape)


def _sharpness(group: _Group) -> Tensor:
    """Blend with the mean over 3 x 3 pixels, the middle one counted five times; the border stays."""
    bytes_GB, (height, width, channels), setting_G, _, tables = group
    images_GHWC = bytes_GB.view(-1, height, width, channels)
    wide = images_GHWC.short()
    tall = wide[:, :-2] + wide[:, 1:-1] + wide[:, 2:]
    total = tall[:, :, :-2] + tall[:, :, 1:-1] + tall[:, :, 2:] + 4 * wide[:, 1:-1, 1:-1]
    # total / 13 + 1/2 is at least 1/26 away from an integer, so no rounding can carry it over one.
    smooth = ((total + 6.5) / 13).floor_()
    inner = images_GHWC[:, 1:-1, 1:-1]
    inner.copy_(_blend(smooth, inner.float(), tables.factor.index_select(0, setting_G).view(-1, 1, 1, 1)))
    return bytes_GB


_CHANGES: dict[tuple[str, ...], Callable[[_Group], Tensor]] = {
    tuple(_MOVES): _move,
    _TONES: _tone,
    ("color",): _color,
    ("sharpness",): _sharpness,
}


def _blend(dull: Tensor, image: Tensor, factor: Tensor) -> Tensor:
    return ((image - dull) * factor + dull).to(torch.uint8)


def _planes(values_GPC: Tensor) -> Tensor:
    """Return the channels apart, (G, C, P), as floats: on a CPU, steps of one are worth the copy."""
    return values_GPC.transpose(1, 2).contiguous().float()


def _grey(planes_GCP: Tensor) -> Tensor:
    """Return the luma (G, P), rounded: a sum with integer weights, below 2^24 and so exact in single precision."""
    if planes_GCP.shape[1] == 1:
        return planes_GCP[:, 0]
    red, green, blue = planes_GCP.unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 32768) / 65536).floor_()


def _values(device: torch.device | None = None) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device)
