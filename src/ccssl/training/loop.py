r"""The loop that all methods share: one explicit step, an evaluation, and the state that a checkpoint keeps.

A step, for B labeled and mu B unlabeled images:

1. weak views of the labeled images; a weak and a strong view of the unlabeled ones, made on the device;
2. the *teacher* predicts the weak views. It is the network being trained, in the same training-mode forward pass as
   everything else (``"model"``: FixMatch and its kin), an evaluation-mode copy that is refreshed every
   ``calibrate_every`` steps (``"snapshot"``: conformal methods), or the averaged network (``"ema"``). Conformal methods
   score their calibration images through the same weak augmentation and the same teacher: only then are calibration and
   unlabeled items exchangeable, which all guarantees rest on. A snapshot and its calibration are renewed together; with
   a teacher that moves at every step the calibration is renewed at every step, too;
3. the method turns predictions into a target and a weight for each unlabeled image, without gradient;
4. one forward and backward pass, one step of SGD, one of the average, for the loss ::

       mean CE(labels, labeled)  +  lambda_u  mean( weight * KL(target || softmax(strong)) )

No step reads from the device: sums of losses are kept there and read at evaluations, and so is the first step whose
loss was not finite. ``check`` reads it, before each evaluation and each checkpoint, and looks at the weights as well,
which a step may spoil whose loss was finite. Everything that a step draws is a function of the seed and the step
(``batches``).

Shapes: B items a batch, K classes, N items of an evaluation.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ccssl import collective, metrics
from ccssl.credal.possibility import Possibility
from ccssl.errors import InputError
from ccssl.images.augment import draw_weak, strong, weak
from ccssl.images.dataset import ImageData
from ccssl.images.splits import Split
from ccssl.methods import Method, unlabeled_loss
from ccssl.training import checkpoint, processes
from ccssl.training.batches import CALIBRATION_VIEW, EVALUATION_VIEW, Batch, Batches, Images, generator, to_device
from ccssl.training.config import TrainingConfig
from ccssl.training.ema import Ema, copy_weights, have_finite_norm, tensors
from ccssl.training.schedule import cosine

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
REFRESH_EVERY = 10  # steps, for a snapshot that the user asks for and the method does not


class NonFiniteLoss(ArithmeticError):
    """A loss, a weight or a prediction was infinite or NaN: at which step, and of which images."""


class PseudoLabels(NamedTuple):
    """Predictions for N unlabeled items, with the labels that the method was not told."""

    ids: np.ndarray  # (N,) positions among the training images
    probabilities: Tensor  # (N, K)
    labels: Tensor  # (N,) -1 where nobody knows
    possibility: Possibility | None  # (N, K) credal methods


class Training:
    """A network in training: what changes, the step that changes it, and its evaluation."""

    def __init__(
        self, network: nn.Module, method: Method, data: ImageData, split: Split, config: TrainingConfig
    ) -> None:
        self.config, self.method, self.data, self.split = config, method, data, split
        if config.batch % collective.world():
            raise InputError(f"batch must be divisible by the {collective.world()} processes, got {config.batch}.")
        if method.uses_unlabeled and not len(split.unlabeled):
            raise InputError("no image is left unlabeled: take fewer labels, or the method supervised.")
        if method.uses_calibration and not len(split.calibration):
            raise InputError("no label is left to calibrate with: take a larger calibration_fraction.")
        self.device = find_device(config.device)
        self.dtype = DTYPES[find_precision(config.precision, self.device)]
        self.teacher = config.teacher or method.teacher
        self.calibrate_every = config.calibrate_every or method.calibrate_every or REFRESH_EVERY
        self.steps_done = 0

        double = self.dtype == torch.float64
        self.network = network.to(self.device, torch.float64 if double else torch.float32)
        if config.channels_last:
            self.network = cast(Any, self.network).to(memory_format=torch.channels_last)
        method.to(self.device)
        self._try_network()
        self.ema = Ema(self.network, config.ema, config.ema_ramp)
        self.snapshot = copy.deepcopy(self.network).eval().requires_grad_(False) if self._keeps_snapshot else None
        self.optimizer = torch.optim.SGD(
            weight_groups(self.network, config.weight_decay),
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.momentum > 0,
            fused=self.device.type == "cuda",
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.forward: nn.Module = self.network
        if collective.world() > 1:
            self.forward = processes.parallel(self.network, self.device)
        if config.compile:
            self.forward = cast(nn.Module, torch.compile(self.forward))

        self.train_images = Images(data.train_images, self.device)
        self.test_images = Images(data.test_images, self.device)
        self.batches = Batches(
            self.train_images,
            data.train_labels,
            split.labeled,
            split.unlabeled if method.uses_unlabeled else None,
            batch=config.batch,
            mu=config.mu,
            flip=data.flip,
            seed=config.seed,
            rank=collective.rank(),
            world=collective.world(),
        )
        self.calibration_labels = to_device(torch.from_numpy(data.train_labels[split.calibration]), self.device)
        # Loss on labeled and on unlabeled items and mean weight, summed over the last ``summed_steps`` steps.
        self.sums = torch.zeros(3, device=self.device, dtype=torch.float64 if self.device.type != "mps" else None)
        self.summed_steps = 0
        self.first_bad_step = torch.full((), -1, device=self.device)
        self._bounded = _of_finite_norm([*tensors(self.network), *tensors(self.ema.network)])

    @property
    def _keeps_snapshot(self) -> bool:
        return self.method.uses_unlabeled and self.teacher == "snapshot"

    def _try_network(self) -> None:
        """Refuse a network that does not answer with a logit for each class, or keeps what no checkpoint can hold."""
        classes, (height, width, channels) = len(self.data.class_names), self.data.train_images.shape[1:]
        images = torch.zeros(2, channels, height, width, dtype=torch.uint8, device=self.device)
        before = checkpoint.random_state()
        with torch.no_grad(), evaluating(self.network), self.autocast():
            found = self.network(images)
        checkpoint.set_random_state(*before)
        told = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if told != (2, classes):
            raise InputError(
                f"the network must turn 2 images into logits of shape (2, {classes}), one for each class, got {told}."
            )
        for name, value in self.network.state_dict().items():
            if not isinstance(value, Tensor) and not _is_plain(value):
                raise InputError(
                    f"the network keeps {name}, a {type(value).__name__}, which no checkpoint can hold: let "
                    "get_extra_state return a tensor, or texts, numbers, lists and dicts."
                )

    # ---- one step -------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> None:
        """Learn from one batch."""
        config, step = self.config, self.steps_done
        if self._calibrates_every_step or (self.method.uses_unlabeled and step % self.calibrate_every == 0):
            self.refresh(step)
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * cosine(step, config.steps)

        self.forward.train()
        labeled, labels = weak(batch.labeled.images, batch.labeled.view), batch.labeled.labels
        loss_u = weight = self.sums.new_zeros(())
        if batch.unlabeled is None:
            loss_l = loss = cross_entropy(self._logits(self.forward, labeled), labels)
        else:
            weak_u = weak(batch.unlabeled.images, batch.unlabeled.weak)
            strong_u = strong(batch.unlabeled.images, batch.unlabeled.strong)
            if self._teaches_in_the_same_pass:
                logits = self._logits(self.forward, torch.cat([labeled, strong_u, weak_u]))
                logits_l, logits_s, logits_w = logits.split([len(labels), len(strong_u), len(weak_u)])
            else:
                logits_w = self.teach(weak_u)
                logits = self._logits(self.forward, torch.cat([labeled, strong_u]))
                logits_l, logits_s = logits.split([len(labels), len(strong_u)])
            target = self.method.target(logits_w.detach(), logits_s.detach(), batch.unlabeled.places)
            loss_l = cross_entropy(logits_l, labels)
            loss_u, weight = unlabeled_loss(logits_s, target), target.weight.mean()
            loss = loss_l + config.lambda_u * loss_u

        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        processes.share_buffers(self.network)
        self.ema.update(step)

        self.sums += torch.stack([x.detach().to(self.sums.dtype) for x in (loss_l, loss_u, weight)])
        bad = ~loss.detach().isfinite() & (self.first_bad_step < 0)
        self.first_bad_step.copy_(torch.where(bad, step, self.first_bad_step))
        self.summed_steps += 1
        self.steps_done += 1

    @property
    def _teaches_in_the_same_pass(self) -> bool:
        """Conformal methods need a teacher that predicts calibration images and weak views alike, one by one."""
        return self.teacher == "model" and not self.method.uses_calibration

    @property
    def _calibrates_every_step(self) -> bool:
        """Whether the teacher of a conformal method moves at every step: scores of an older one would not be its."""
        return self.method.uses_calibration and self.snapshot is None

    def refresh(self, step: int) -> None:
        """Renew the snapshot and, with the new teacher, the calibration."""
        if self.snapshot is not None:
            copy_weights(self.network, self.snapshot)
        if self.method.uses_calibration:
            self.calibrate(self.method, self.teaching_network, step)

    @torch.no_grad()
    def calibrate(self, method: Method, network: nn.Module, step: int | None) -> None:
        """Calibrate a method with a network's predictions: of weak views, or with no step of the plain images."""
        ids = self.split.calibration
        images = self.train_images.take(ids)
        if step is not None:
            height, width = self.train_images.shape[1:3]
            draw = draw_weak(
                len(ids), height, width, self.data.flip, generator(self.config.seed, step, CALIBRATION_VIEW)
            )
            images = weak(images, draw.to(self.device, non_blocking=True))
        with evaluating(network):
            logits = torch.cat([self._logits(network, part) for part in images.split(self.config.eval_batch)])
        method.calibrate(collective.broadcast(logits), self.calibration_labels)

    @property
    def teaching_network(self) -> nn.Module:
        """The network whose predictions become pseudo-labels."""
        if self.snapshot is not None:
            return self.snapshot
        return self.ema.network if self.teacher == "ema" else self.network

    @torch.no_grad()
    def teach(self, images: Tensor) -> Tensor:
        """Return the teacher's logits, in evaluation mode."""
        with evaluating(self.teaching_network):
            return self._logits(self.teaching_network, images)

    def _logits(self, network: nn.Module, images_NHWC: Tensor) -> Tensor:
        """Predict uint8 images; logits come in float32 (or float64)."""
        images = images_NHWC.permute(0, 3, 1, 2)  # in memory, channels stay innermost
        if not self.config.channels_last:
            images = images.contiguous()
        with self.autocast():
            logits = network(images)
        return logits if logits.dtype == torch.float64 else logits.float()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which networks run."""
        if self.dtype in (torch.float32, torch.float64):
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    # ---- evaluation -----------------------------------------------------------------------------------------------

    def run(self, until: int) -> Iterator[int]:
        """Train up to step ``until``, yielding the number of steps done after each."""
        for batch in self.batches.ahead(self.steps_done, until):
            self.step(batch)
            yield self.steps_done

    def check(self) -> None:
        """Raise if a loss or a weight was not finite, on any rank: nothing after it is worth keeping."""
        sound = have_finite_norm(self._bounded).all()
        told = torch.stack([self.first_bad_step, sound.to(self.first_bad_step)])
        bad_steps, sounds = collective.gather(told[None]).T.tolist()
        if bad := [step for step in bad_steps if step >= 0]:
            labeled, unlabeled = self.batches.ids(min(bad))
            raise NonFiniteLoss(
                f"the loss was not finite at step {min(bad)}, with labeled images {_listed(labeled)}"
                + (f" and unlabeled images {_listed(unlabeled)}" if len(unlabeled) else "")
            )
        if not all(sounds):
            raise NonFiniteLoss(f"at step {self.steps_done} the weights were not finite, or beyond all bounds")

    def losses(self) -> dict[str, float]:
        """Return the mean losses since the last call, and begin anew."""
        labeled, unlabeled, weight = (collective.mean(self.sums) / self.summed_steps).tolist()
        self.sums.zero_()
        self.summed_steps = 0
        lr = self.config.lr * cosine(self.steps_done - 1, self.config.steps)
        found = {"loss": labeled + self.config.lambda_u * unlabeled, "loss_labeled": labeled}
        if self.method.uses_unlabeled:
            found |= {"loss_unlabeled": unlabeled, "weight": weight}
        return found | {"lr": lr}

    @torch.no_grad()
    def evaluate(self) -> dict[str, dict[str, float]]:
        """Return the figures of the averaged network on held-out parts, and of the teacher on unlabeled images."""
        found = {part: self.evaluate_on(part) for part in ("test", "validation") if len(getattr(self.split, part))}
        if self.method.uses_unlabeled and self.config.eval_unlabeled:
            found["unlabeled"] = self.evaluate_pseudo_labels()
        return found

    def evaluate_on(self, part: str) -> dict[str, float]:
        """Return the figures of the averaged network on the part ``"test"`` or ``"validation"``."""
        probabilities, labels, pi = self.predictions(part)
        return metrics.evaluate(probabilities, labels, pi)

    @torch.no_grad()
    def predictions(self, part: str) -> tuple[Tensor, Tensor, Possibility | None]:
        """Return the averaged network's probabilities on a part, the labels, and possibilities for credal methods.

        Conformal methods are calibrated for it with the averaged network and images as they are, like the part's.
        """
        if part == "test":
            images, ids, labels = self.test_images, self.split.test, self.data.test_labels[self.split.test]
        else:
            images, ids, labels = (
                self.train_images,
                self.split.validation,
                self.data.train_labels[self.split.validation],
            )
        logits = self._predict(self.ema.network, images, ids, None)
        method = copy.deepcopy(self.method)
        if method.uses_calibration:
            self.calibrate(method, self.ema.network, None)
        return logits.softmax(-1), torch.from_numpy(labels).to(self.device), method.possibility(logits)

    def evaluate_pseudo_labels(self) -> dict[str, float]:
        """Return the figures of the pseudo-labels."""
        found = self.pseudo_labels()
        if not bool((found.labels >= 0).any()):
            return {}  # nobody knows the truth
        return metrics.evaluate(found.probabilities, found.labels, found.possibility)

    @torch.no_grad()
    def pseudo_labels(self) -> PseudoLabels:
        """Return what the teacher says about weak views of unlabeled images, as it does in training."""
        if self._calibrates_every_step:
            self.refresh(self.steps_done)  # which the next step would do
        pool = self.split.unlabeled
        every = max(1, math.ceil(len(pool) / max(1, self.config.eval_unlabeled)))
        ids = pool[::every]
        labels = torch.from_numpy(self.data.train_labels[ids]).to(self.device)
        draw = generator(self.config.seed, self.steps_done, EVALUATION_VIEW)
        logits = self._predict(self.teaching_network, self.train_images, ids, draw)
        return PseudoLabels(ids, logits.softmax(-1), labels, self.method.possibility(logits))

    def _predict(self, network: nn.Module, images: Images, ids: np.ndarray, draw: torch.Generator | None) -> Tensor:
        """Return logits (N, K), each rank having predicted its share; with ``draw`` those of weak views."""
        N, world, rank, size = len(ids), collective.world(), collective.rank(), self.config.eval_batch
        height, width = images.shape[1:3]
        view = None if draw is None else draw_weak(N, height, width, self.data.flip, draw)
        share = math.ceil(N / world)
        mine = np.arange(rank * share, (rank + 1) * share).clip(max=N - 1)  # the last share is padded
        parts = []
        with evaluating(network):
            for start in range(0, share, size):
                rows = mine[start : start + size]
                batch = images.take(ids[rows])
                if view is not None:
                    batch = weak(batch, view[torch.from_numpy(rows)].to(self.device))
                parts.append(self._logits(network, batch))
        logits = collective.gather(torch.cat(parts))[:N]
        if bool(logits.softmax(-1).isnan().any()):
            raise NonFiniteLoss(f"at step {self.steps_done} the network's predictions were no numbers")
        return logits

    # ---- state ----------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that a checkpoint keeps; all ranks must ask, for sums are over all of them."""
        found = {name: value for name, value in self._states().items() if isinstance(value, Tensor)}
        for name, parameter in self.network.named_parameters():
            momentum = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                found[f"momentum.{name}"] = momentum
        return found | {"sums": collective.mean(self.sums)}

    def state(self) -> dict[str, Any]:
        """Return what else a checkpoint keeps; the sampler's position and the schedule's are the step."""
        return {
            "steps_done": self.steps_done,
            "summed_steps": self.summed_steps,
            "scaler": self.scaler.state_dict(),
            "extra": {name: value for name, value in self._states().items() if not isinstance(value, Tensor)},
        }

    def _parts(self) -> dict[str, nn.Module]:
        """Return the modules whose state a checkpoint keeps."""
        parts = {"model": self.network, "ema": self.ema.network, "method": self.method}
        return parts if self.snapshot is None else parts | {"snapshot": self.snapshot}

    def _states(self) -> dict[str, Any]:
        """Return their states: tensors, and what modules of the user's may give beside them."""
        return {
            f"{name}.{key}": value
            for name, part in self._parts().items()
            for key, value in part.state_dict().items()
        }

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Go back to where a checkpoint was made."""
        states = {**tensors, **state.get("extra", {})}
        for name, part in self._parts().items():
            start = f"{name}."
            try:
                part.load_state_dict({k.removeprefix(start): v for k, v in states.items() if k.startswith(start)})
            except RuntimeError as error:  # torch names the tensors that differ, a line each
                told = "; ".join(line.strip() for line in str(error).splitlines())
                raise InputError(f"the checkpoint is that of another network or method: {told}") from None
        for name, parameter in self.network.named_parameters():
            if f"momentum.{name}" in tensors:
                momentum = torch.empty_like(parameter).copy_(tensors[f"momentum.{name}"])
                self.optimizer.state[parameter]["momentum_buffer"] = momentum
        self.sums.copy_(tensors["sums"])
        self.steps_done, self.summed_steps = state["steps_done"], state["summed_steps"]
        self.scaler.load_state_dict(state["scaler"])


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode for a while, and back into the mode it was in."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


def weight_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups: decay for matrices and kernels, none for biases and the scales of norms."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def _of_finite_norm(tensors: list[Tensor]) -> list[Tensor]:
    """Return those tensors of numbers whose norm is finite: what masks with infinity keeps doing so."""
    numbers = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    return [number for number, finite in zip(numbers, have_finite_norm(numbers).tolist(), strict=True) if finite]


def _is_plain(value: object) -> bool:
    """Tell whether a value comes back from JSON as it was."""
    try:
        return json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError):
        return False


def find_device(name: str) -> torch.device:
    """Return the device of a name; ``auto`` takes an accelerator where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device must be auto, cpu, cuda, cuda:N or mps, got {name!r}.") from None
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(device.type, False):
        raise InputError(f"device {name} is not here: ccssl doctor lists what this machine has.")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", processes.local_rank() if collective.world() > 1 else 0)
    return device


def find_precision(name: str, device: torch.device) -> str:
    """Return the precision of a name; ``auto`` takes bf16 where the machine computes in it."""
    if name == "fp16" and device.type == "cpu":
        raise InputError("precision fp16 needs an accelerator: take bf16 or fp32 on a CPU.")
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if device.type == "cpu" and _cpu_computes_in_bf16() else "fp32"


def _cpu_computes_in_bf16() -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _listed(ids: np.ndarray) -> str:
    return ", ".join(str(i) for i in ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
