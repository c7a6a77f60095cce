r"""A credal set as a polytope: its extreme points, and a picture of it for three and four classes.

Q_pi is closed, bounded and cut out by linear inequalities, so it is the convex hull of its extreme points.
These can be written down. Let w be any weights on the classes and ask for the p in Q_pi with the greatest
w . p. Walk through the classes by falling weight, c_1, c_2, ..., and give each one as much as the bounds
still allow. The bound on the first i classes together is the running maximum

    m_i = max(pi(c_1), ..., pi(c_i)),          m_0 = 0,

and m_i - m_{i-1} for c_i exhausts all of them at once. No p in Q_pi can do better: summation by parts turns
w . p into sum_i (w_{c_i} - w_{c_{i+1}}) p({c_1, ..., c_i}) plus a constant, its coefficients are
non-negative, and each probability in it is as large as its bound. Nor is any constraint left violated, for
the mass that was given to an event never exceeds the largest degree met inside it. So every extreme point is
the list of increments of a running maximum, along some order of the classes.

An increment is positive only where the running maximum rises: at *records*. An extreme point is therefore a
choice of some of the distinct positive levels of pi, always with the level 1 among them, and of one class on
each chosen level, which receives the difference to the chosen level below it. Different choices have
different supports, and each one is extreme: it alone maximises w . p for weights that fall along it, from
the lowest chosen level up, and are smaller still elsewhere. With n_l classes on level l there are exactly

    n_1 * prod over the lower positive levels l of (1 + n_l)

extreme points: 2^(K-1) where all degrees are positive and differ (ties only lower the number), one for a
one-hot pi, K for the vacuous one.

Shapes: K classes, n extreme points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ccssl.credal.faults import check_classes, check_tensor
from ccssl.credal.possibility import Levels, Possibility, as_dense, check_possibility, contains

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

MAX_NUMBERS = 20_000_000  # n * K; reached at 21 classes of distinct possibility


def extreme_points(pi: Possibility) -> Tensor:
    """Return the extreme points of Q_pi, one a row, for a single possibility distribution (K,).

    They come without repetition, in a fixed order, in pi's dtype and on its device.

    >>> extreme_points(torch.tensor([0.25, 1.0, 0.5]))
    tensor([[0.0000, 1.0000, 0.0000],
            [0.2500, 0.7500, 0.0000],
            [0.0000, 0.5000, 0.5000],
            [0.2500, 0.5000, 0.2500]])
    """
    pi_K = _single_distribution(pi)
    level_l, number_l = pi_K.unique(return_counts=True)
    levels, numbers = level_l[level_l > 0].tolist(), number_l[level_l > 0].tolist()
    number = numbers[-1] * math.prod(1 + tied for tied in numbers[:-1])
    if number * len(pi_K) > MAX_NUMBERS:
        magnitude = f"{number:,}" if number < 10**12 else f"about 10^{round(math.log10(number))}"
        raise ValueError(
            f"pi has {magnitude} extreme points of {len(pi_K):,} probabilities each, "
            f"expected at most {MAX_NUMBERS:,} numbers in all"
        )
    p_nK = torch.zeros(1, len(pi_K), dtype=torch.float64)
    given_n = torch.zeros(1, dtype=torch.float64)
    for level in levels:
        classes = (pi_K == level).nonzero().squeeze(-1)
        raised_nK = p_nK.repeat(len(classes), 1)
        receiver_n1 = classes.repeat_interleave(len(p_nK)).unsqueeze(-1)
        raised_nK.scatter_(-1, receiver_n1, (level - given_n).repeat(len(classes)).unsqueeze(-1))
        if level == 1:  # never left out: the whole mass must be given
            p_nK = raised_nK
        else:
            p_nK = torch.cat([p_nK, raised_nK])
            given_n = torch.cat([given_n, torch.full((len(raised_nK),), level, dtype=torch.float64)])
    dtype = torch.get_default_dtype() if isinstance(pi, Levels) else pi.dtype
    return p_nK.to(device=pi.device, dtype=dtype)


def draw(
    pi: Possibility,
    prediction: Tensor | None = None,
    projection: Tensor | None = None,
    labels: Sequence[str] | None = None,
) -> str:
    """Return an SVG picture of Q_pi for three or four classes, in barycentric coordinates.

    A corner of the triangle (of the tetrahedron) is the distribution that is certain of one class; a point is
    the mixture of the corners with its probabilities as weights. The picture shows Q_pi with its extreme
    points, and, where a ``prediction`` (K,) is given, an arrow from it to its ``projection``, the member of
    Q_pi with the least KL divergence from it, computed unless it is given. Hidden edges are dashed.

    The picture carries its own light background and is legible on any page; equal input gives equal bytes.
    """
    pi_K = _single_distribution(pi)
    K = len(pi_K)
    if K not in _CANVAS:
        raise ValueError(f"pi must have three or four classes to be drawn, got {K}")
    names = [f"class {k}" for k in range(K)] if labels is None else [_printable(str(name)) for name in labels]
    if len(names) != K:
        raise ValueError(f"labels must name {K} classes, got {len(names)}")
    if prediction is None and projection is not None:
        raise ValueError("projection needs the prediction that it belongs to, got None")
    if prediction is not None:
        prediction = _check_distribution(prediction, "prediction", K)
        if projection is None:
            from ccssl.credal.projection import project

            projection = project(prediction, pi_K)
        projection = _check_distribution(projection, "projection", K)
        if not bool(contains(projection, pi_K, atol=1e-3)):
            raise ValueError(f"projection must lie in the credal set of pi, got {projection.tolist()}")
    return _picture(pi_K, extreme_points(pi_K), prediction, projection, names)


def _single_distribution(pi: Possibility) -> Tensor:
    """Return pi in float64 on the CPU, refusing what is not one possibility distribution."""
    if isinstance(pi, Levels):
        check_possibility(pi, validate=True)
    else:
        check_tensor(pi, "pi")
    if len(pi.shape) != 1:
        raise ValueError(f"pi must be a single distribution of shape (K,), got shape {tuple(pi.shape)}")
    if isinstance(pi, Tensor) and not pi.is_floating_point():
        raise ValueError(f"pi must be floating point, got {pi.dtype}")
    pi_K = as_dense(pi).detach().to(device="cpu", dtype=torch.float64)
    check_classes(pi_K, "pi")
    outside_K = ~((pi_K >= 0) & (pi_K <= 1))
    if bool(outside_K.any()):
        raise ValueError(f"pi must lie in [0, 1], got {float(pi_K[outside_K][0])}")
    if pi_K.max() != 1:
        raise ValueError(f"pi must have maximum exactly 1, got {float(pi_K.max())}")
    return pi_K


def _check_distribution(p: Tensor, name: str, K: int) -> Tensor:
    p_K = torch.as_tensor(p).detach().to(device="cpu", dtype=torch.float64)
    if p_K.shape != (K,):
        raise ValueError(f"{name} must have shape ({K},), got {tuple(p_K.shape)}")
    if not (bool((p_K >= 0).all()) and abs(float(p_K.sum()) - 1) <= 1e-3):
        raise ValueError(f"{name} must be a probability distribution, got {p_K.tolist()}")
    return p_K


# The picture. Coordinates are points of the canvas, x to the right, y upwards.

# After Okabe and Ito: told apart under the common kinds of colour blindness; dark enough for text on white.
PAPER, INK, MUTED = "#ffffff", "#1f2328", "#57606a"
SET, PREDICTION, PROJECTION = "#0072b2", "#d55e00", "#007a5a"

_CANVAS = {3: (420, 326), 4: (460, 396)}
_SIDE = {3: 256.0, 4: 306.0}
_CENTRE = {3: (210.0, 128.0), 4: (238.0, 184.0)}  # where the uniform distribution lies
_DISTANCES = (0, 8, 18, 32, 50, 72, 98)  # of labels from their points
_FLAT = 2e-3  # a polytope thinner than this share of an edge is drawn as flat


class _Label(NamedTuple):
    """Lines of text that belong to a point; the first line is bold where there are several."""

    at: np.ndarray
    lines: tuple[str, ...]
    colour: str
    size: float
    away: float  # how far from the point the text may begin

    def styled(self) -> list[tuple[str, str]]:
        """Return each line with its weight."""
        return [(line, "bold" if i < len(self.lines) - 1 else "normal") for i, line in enumerate(self.lines)]


def _corners(K: int) -> np.ndarray:
    """Return the corners on the canvas, (K, 3): the third coordinate points to the spectator."""
    import numpy as np

    if K == 3:
        angle_K = np.radians([210.0, 330.0, 90.0])
        corner_K3 = np.stack([np.cos(angle_K), np.sin(angle_K), 0 * angle_K], -1) / math.sqrt(3)
    else:
        # Three corners on the ground, one on top; seen from a little above, the second corner in front.
        angle = np.radians([160.0, 280.0, 40.0])
        ground = np.stack([np.cos(angle), np.sin(angle), 0 * angle], -1) / math.sqrt(3)
        corner_K3 = np.vstack([ground, [0.0, 0.0, math.sqrt(2 / 3)]])
        corner_K3 -= corner_K3.mean(0)
        tilt = math.radians(20.0)
        right, depth, height = corner_K3.T
        up = depth * math.sin(tilt) + height * math.cos(tilt)
        near = height * math.sin(tilt) - depth * math.cos(tilt)
        corner_K3 = np.stack([right, up, near], -1)
    return corner_K3 * _SIDE[K] + np.array([*_CENTRE[K], 0.0])


class _Body(NamedTuple):
    """A convex body on the canvas: outlines of its faces, and its edges, seen and hidden."""

    faces: list[np.ndarray]
    seen: list[np.ndarray]
    hidden: list[np.ndarray]


def _body(points_n3: np.ndarray) -> _Body:
    """Find faces and edges of the convex hull; an edge is hidden if both its faces look away."""
    import numpy as np

    centred_n3 = points_n3 - points_n3.mean(0)
    _, stretch, axes = np.linalg.svd(centred_n3, full_matrices=False)
    dimension = int((stretch > _FLAT * max(_SIDE.values())).sum())
    if dimension == 0:
        return _Body([], [], [])
    if dimension == 1:
        along_n = centred_n3 @ axes[0]
        return _Body([], [points_n3[[along_n.argmin(), along_n.argmax()]]], [])
    if dimension == 2:
        ring = _around(centred_n3 @ axes[:2].T)
        outline = points_n3[ring]
        return _Body([outline], [np.stack(side) for side in zip(outline, np.roll(outline, -1, 0), strict=True)], [])

    from scipy.spatial import ConvexHull

    hull = ConvexHull(points_n3)
    # Qhull cuts faces into triangles: put together again those that share a plane.
    planes: list[np.ndarray] = []
    corners: list[set[int]] = []
    for triangle, plane in zip(hull.simplices, hull.equations, strict=True):
        same = [i for i, known in enumerate(planes) if np.allclose(known[:3], plane[:3], atol=1e-3)]
        if same:
            corners[same[0]].update(triangle.tolist())
        else:
            planes.append(plane)
            corners.append(set(triangle.tolist()))
    faces, edges = [], {}
    for plane, members in zip(planes, corners, strict=True):
        ids = np.array(sorted(members))
        face_n3 = points_n3[ids]
        _, _, in_plane = np.linalg.svd(face_n3 - face_n3.mean(0), full_matrices=False)
        ring = ids[_around((face_n3 - face_n3.mean(0)) @ in_plane[:2].T)]
        faces.append(points_n3[ring])
        for a, b in zip(ring.tolist(), np.roll(ring, -1).tolist(), strict=True):
            edge = (min(a, b), max(a, b))
            edges[edge] = edges.get(edge, False) or bool(plane[2] > 1e-9)
    seen = [points_n3[list(edge)] for edge, facing in edges.items() if facing]
    hidden = [points_n3[list(edge)] for edge, facing in edges.items() if not facing]
    return _Body(faces, seen, hidden)


def _around(flat_n2: np.ndarray) -> np.ndarray:
    """Return the order of the corners of a convex polygon around its centre."""
    import numpy as np

    return np.argsort(np.arctan2(flat_n2[:, 1], flat_n2[:, 0]), kind="stable")


def _picture(
    pi_K: Tensor, vertices_nK: Tensor, prediction: Tensor | None, projection: Tensor | None, names: list[str]
) -> str:
    import io
    import warnings

    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    width, height = _CANVAS[len(pi_K)]
    style: dict[Any, Any] = {
        "svg.hashsalt": "ccssl",  # equal pictures get equal ids
        "svg.fonttype": "none",  # text stays text: any script, selectable, read aloud
        "font.family": ["sans-serif"],
        "font.sans-serif": ["DejaVu Sans"],
        "text.usetex": False,
    }
    title = f"Credal set of the possibility distribution {_tuple(pi_K)}"
    with mpl.rc_context(style), warnings.catch_warnings():
        # What the measuring font lacks, the reader's own font will draw.
        warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, facecolor=PAPER)
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
        axes.set_axis_off()
        _draw(axes, pi_K, vertices_nK, prediction, projection, names)
        buffer = io.StringIO()
        metadata = {"Title": title, "Date": None, "Creator": None}
        figure.savefig(buffer, format="svg", facecolor=PAPER, metadata=metadata)
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :].replace("<svg", '<svg role="img"', 1)


def _draw(
    axes: Axes,
    pi_K: Tensor,
    vertices_nK: Tensor,
    prediction: Tensor | None,
    projection: Tensor | None,
    names: list[str],
) -> None:
    import numpy as np

    corner_K3 = _corners(len(pi_K))
    vertex_n3 = vertices_nK.numpy() @ corner_K3
    frame, body = _body(corner_K3), _body(vertex_n3)
    _draw_body(axes, frame, colour=MUTED, fill=None, width=1.2)
    _draw_body(axes, body, colour=SET, fill=SET, width=1.8)
    axes.plot(*vertex_n3[:, :2].T, "o", color=SET, markersize=5, zorder=5)

    marks = [vertex_n3[:, :2], corner_K3[:, :2]]
    labels = [
        _Label(corner[:2], (name, f"π = {_number(degree)}"), INK, 13, 9)
        for corner, name, degree in zip(corner_K3, names, pi_K.tolist(), strict=True)
    ]
    captioned = []
    if prediction is not None and projection is not None:
        q_2, p_2 = (prediction.numpy() @ corner_K3)[:2], (projection.numpy() @ corner_K3)[:2]
        distance = float(np.hypot(*(q_2 - p_2)))
        axes.plot(*q_2, "D", color=PREDICTION, markersize=6, zorder=8)
        if distance < 2:
            labels.append(_Label(q_2, ("prediction, already inside", _tuple(prediction)), PREDICTION, 12, 8))
        else:
            axes.plot(*p_2, "s", color=PROJECTION, markersize=8, zorder=7)
            labels.append(_Label(q_2, ("prediction", _tuple(prediction)), PREDICTION, 12, 8))
            labels.append(_Label(p_2, ("projection", _tuple(projection)), PROJECTION, 12, 8))
        if distance > 12:
            arrow = {"arrowstyle": "-|>", "color": INK, "lw": 1.3, "shrinkA": 5, "shrinkB": 5}
            axes.annotate("", xy=tuple(p_2), xytext=tuple(q_2), arrowprops=arrow, zorder=6)
        marks.append(np.linspace(q_2, p_2, 12))
        captioned.append(p_2)
    for vertex_K, at_2 in zip(vertices_nK, vertex_n3[:, :2], strict=True):
        # one caption for points that the eye cannot tell apart
        if all(np.hypot(*(at_2 - other_2)) > 4 for other_2 in captioned):
            labels.append(_Label(at_2, (_tuple(vertex_K),), SET, 11 if len(pi_K) == 3 else 10, 6))
            captioned.append(at_2)

    canvas = _CANVAS[len(pi_K)]
    lines = [*frame.seen, *frame.hidden, *body.seen, *body.hidden]
    dots_d2 = np.vstack([np.linspace(a[:2], b[:2], 1 + int(np.hypot(*(a - b)[:2]) // 4)) for a, b in lines])
    sizes = [_measure(label, canvas) for label in labels]
    for label, size, centre in zip(
        labels, sizes, _place(labels, sizes, np.vstack(marks), dots_d2, canvas), strict=True
    ):
        _write(axes, label, size, centre)


def _draw_body(axes: Axes, body: _Body, colour: str, fill: str | None, width: float) -> None:
    for face in body.faces:
        if fill is not None:
            axes.fill(*face[:, :2].T, facecolor=fill, alpha=0.14 if len(body.faces) > 1 else 0.22, lw=0, zorder=2)
    for side in body.hidden:
        axes.plot(*side[:, :2].T, color=colour, lw=0.7 * width, dashes=(3, 3), zorder=3)
    for side in body.seen:
        axes.plot(*side[:, :2].T, color=colour, lw=width, solid_capstyle="round", zorder=4)


def _place(
    labels: list[_Label],
    sizes: list[np.ndarray],
    marks_m2: np.ndarray,
    dots_d2: np.ndarray,
    canvas: tuple[int, int],
) -> list[np.ndarray]:
    """Return the centre of each label: labels cover neither each other nor a mark, and few dots of lines.

    A label may stand in 24 directions and at 7 distances from its point. It takes the cheapest place: leaving
    the canvas is forbidden, covering other labels costs most, then marks, then lines, then distance. A few
    rounds let early labels make way for late ones.
    """
    import numpy as np

    angle_a = np.radians(np.arange(0, 360, 15))
    unit_a2 = np.stack([np.cos(angle_a), np.sin(angle_a)], -1)
    middle_2 = np.array(canvas) / 2
    places, prices = [], []
    for label, size in zip(labels, sizes, strict=True):
        # from the centre of the box to its border, in each direction
        reach_a = (size / 2 / np.maximum(np.abs(unit_a2), 1e-9)).min(-1)
        outward = label.at - dots_d2.mean(0)
        sideways_a = 1 - unit_a2 @ outward / max(float(np.hypot(*outward)), 1e-9)
        place_c2 = np.vstack([
            label.at + unit_a2 * (reach_a + label.away + extra)[:, None] for extra in _DISTANCES
        ])  # fmt: skip
        price_c = np.concatenate([0.8 * extra + 4 * sideways_a for extra in _DISTANCES])
        price_c += 1e6 * (np.abs(place_c2 - middle_2) + size / 2 > middle_2 - 3).any(-1)
        for points, price in ((marks_m2, 40.0), (dots_d2, 5.0)):
            price_c += price * (np.abs(place_c2[:, None] - points) < size / 2 + 2).all(-1).sum(-1)
        places.append(place_c2)
        prices.append(price_c)

    step_s1 = np.linspace(0, 1, 8)[:, None]

    def settle(order: list[int]) -> tuple[float, dict[int, np.ndarray]]:
        """Place the labels in this order, again and again; return what the last round cost."""
        chosen: dict[int, np.ndarray] = {}
        paid = 0.0
        for _ in range(4):
            paid = 0.0
            for i in order:
                total_c = prices[i].copy()
                way_cs2 = labels[i].at + (places[i] - labels[i].at)[:, None] * step_s1
                for j, other_2 in chosen.items():
                    if j == i:
                        continue
                    common_c2 = (sizes[i] + sizes[j]) / 2 - np.abs(places[i] - other_2)
                    total_c += 20 * np.prod(np.maximum(common_c2 + 2, 0), -1)
                    # Neither label may lie on the other one's way to its point.
                    other_way_s2 = labels[j].at + (other_2 - labels[j].at) * step_s1
                    total_c += 15 * (np.abs(way_cs2 - other_2) < sizes[j] / 2).all(-1).sum(-1)
                    total_c += 15 * (np.abs(other_way_s2 - places[i][:, None]) < sizes[i] / 2).all(-1).sum(-1)
                chosen[i] = places[i][total_c.argmin()]
                paid += float(total_c.min())
        return paid, chosen

    forwards = list(range(len(labels)))
    _, chosen = min(settle(forwards), settle(forwards[::-1]), key=lambda outcome: outcome[0])
    return [chosen[i] for i in forwards]


def _measure(label: _Label, canvas: tuple[int, int]) -> np.ndarray:
    """Return the width and height of a label, with a little room around it."""
    import numpy as np
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.font_manager import FontProperties

    renderer = RendererAgg(*canvas, 72)
    widths = [
        renderer.get_text_width_height_descent(line, FontProperties(size=label.size, weight=weight), False)[0]
        for line, weight in label.styled()
    ]
    return np.array([max(widths) + 4, 1.25 * label.size * len(label.lines) + 2])


def _write(axes: Axes, label: _Label, size: np.ndarray, centre: np.ndarray) -> None:
    """Write a label, with a thin line to its point where it stands apart."""
    import numpy as np

    nearest = centre + np.clip(label.at - centre, -size / 2, size / 2)
    if np.hypot(*(label.at - nearest)) > label.away + 12:
        axes.plot(*np.stack([label.at, nearest]).T, color=label.colour, lw=0.6, alpha=0.7, zorder=4)
    for i, (line, weight) in enumerate(label.styled()):
        axes.text(
            centre[0],
            centre[1] + 1.25 * label.size * ((len(label.lines) - 1) / 2 - i),
            line,
            color=label.colour if i == 0 else MUTED,
            fontsize=label.size,
            fontweight=weight,
            ha="center",
            va="center_baseline",
            parse_math=False,
            bbox={"boxstyle": "square,pad=0.08", "facecolor": PAPER, "alpha": 0.7, "lw": 0},
            zorder=9,
        )


def _number(value: float) -> str:
    if value in (0.0, 1.0):
        return str(int(value))
    if value < 0.005:
        return "≈0"
    return f"{value:.2f}".removeprefix("0") if value < 0.995 else "≈1"


def _tuple(values: Tensor) -> str:
    return "(" + ", ".join(_number(value) for value in values.tolist()) + ")"


def _printable(name: str) -> str:
    """Return the name without what XML or a picture cannot hold: control characters, undue length."""
    clean = "".join(c if c.isprintable() else " " for c in name)
    return clean if len(clean) <= 20 else clean[:19] + "…"
