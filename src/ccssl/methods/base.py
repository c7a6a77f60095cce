r"""What a method of learning from unlabeled items is: a target and a weight for each of them.

Every method here minimises, over labeled items (x, y) and unlabeled items u, ::

    mean -log q(y | x)   +   lambda_u  mean  w(u) KL( p(u) || q(. | strong view of u) ),      q = softmax(model).

The methods differ in the target distribution p(u), which they take from the *weak* view of u, and in the weight
w(u) in [0, 1], 0 to leave u out. Targets are constants: no gradient passes through them, so that the gradient of a
term with respect to the logits of the strong view is w (q - p). Hard pseudo-labels are one-hot targets, whose term
is the cross-entropy. A credal method has a whole set of distributions for u, and p(u) is the member nearest to
q(. | strong view); by the envelope theorem (``ccssl.credal.projection``) holding it fixed gives the gradient of the
credal loss, so that these methods fit the same form.

How to add a method: write one file with a subclass of ``Method``, put a frozen dataclass of its hyperparameters into
``config`` and the class into ``table``, and give it its line in the contract test, which fails until then. ``target``
is called once a step, by all ranks, and must not read from the device; what it remembers from step to step lives in
buffers (then it is in checkpoints) and is the same on all ranks (``ccssl.collective``). It sees the logits of the
strong view for one purpose, to project: labels, weights and possibilities come from the weak view.

Shapes: B unlabeled items of a batch, K classes, U items in the unlabeled pool, L calibration items.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ccssl.credal.possibility import Possibility
from ccssl.errors import InputError

Teacher = Literal["model", "snapshot", "ema"]


class Target(NamedTuple):
    """What the strong views of a batch should predict."""

    probabilities: Tensor  # (B, K) distributions
    weight: Tensor  # (B,) in [0, 1]; 0 leaves the item out
    possibility: Possibility | None = None  # (B, K) credal methods: what validity and efficiency are measured on


class Method(nn.Module):
    """One way of learning from unlabeled items. Subclasses implement ``target``."""

    Config: ClassVar[type]  # a frozen dataclass: the hyperparameters, each with metadata["help"]

    uses_unlabeled: bool = True  # False: there is no unlabeled part of the loss, and no batch is loaded for it
    uses_calibration: bool = False  # True: a part of the labels is set aside, and ``calibrate`` is called
    calibrate_every: int | None = None  # steps after which the snapshot and the calibration are renewed
    teacher: Teacher = "model"  # who predicts the weak views, unless the user says otherwise

    prior: Tensor  # (K,) class frequencies of the labeled items

    def __init__(self, classes: int, unlabeled: int, config: Any = None, prior: Tensor | None = None) -> None:
        """Take the number of classes, the size of the unlabeled pool, a ``Config``, and the class frequencies.

        Without ``config`` its defaults are used, without ``prior`` all classes are deemed equally frequent.
        """
        super().__init__()
        if classes < 2:
            raise InputError(f"a method needs at least 2 classes to choose from, got {classes}")
        if unlabeled < 0:
            raise InputError(f"unlabeled must be the size of the unlabeled pool, at least 0, got {unlabeled}")
        self.classes, self.unlabeled = classes, unlabeled
        self.config = self.Config() if config is None else config
        if not isinstance(self.config, self.Config):
            raise InputError(
                f"config must be a {self.Config.__name__} for {type(self).__name__}, got {type(config).__name__}"
            )
        self.register_buffer("prior", _frequencies(prior, classes))

    def calibrate(self, logits: Tensor, labels: Tensor) -> None:
        """Take the teacher's logits (L, K) of the weak views of the calibration items, and their labels (L,)."""
        raise NotImplementedError(f"{type(self).__name__} has no calibration: uses_calibration is False")

    def possibility(self, logits: Tensor) -> Possibility | None:
        """Return the possibility degrees that the weak predictions (N, K) stand for, or None without a credal set.

        Unlike ``target`` it changes nothing: it serves evaluation.
        """
        return None

    def target(self, weak: Tensor, strong: Tensor, index: Tensor) -> Target:
        """Return what the strong views should predict, given the logits of both views (B, K).

        ``index`` (B,) tells the place of each item in the unlabeled pool, 0 to U - 1. Running statistics may move.
        """
        raise NotImplementedError(f"{type(self).__name__} must say what the target of an unlabeled item is")


def unlabeled_loss(strong: Tensor, target: Target) -> Tensor:
    """Return mean( w KL( p || softmax(strong) ) ) over the batch, with 0 log 0 = 0.

    The gradient is w (softmax(strong) - p) / B. Half precision is computed in float32.

    >>> strong = torch.tensor([[0.0, 0.0], [3.0, 0.0]], requires_grad=True)
    >>> loss = unlabeled_loss(strong, Target(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([1.0, 0.0])))
    >>> loss.backward()
    >>> loss.detach(), strong.grad
    (tensor(0.3466), tensor([[-0.2500,  0.2500],
            [ 0.0000,  0.0000]]))
    """
    p_BK = target.probabilities.detach()
    log_q_BK = widen(strong).log_softmax(-1)
    divergence_B = (torch.xlogy(p_BK, p_BK) - p_BK * log_q_BK).sum(-1)
    return (target.weight.detach() * divergence_B).mean()


def widen(logits: Tensor) -> Tensor:
    """Return logits in float32 at least: targets decide by small differences, which autocast would round away."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def one_hot(label: Tensor, like: Tensor) -> Tensor:
    """Return the distributions that are certain of ``label`` (B,), in the shape and type of ``like`` (B, K)."""
    return torch.zeros_like(like).scatter_(-1, label.unsqueeze(-1), 1.0)  # functional.one_hot reads from the device


def _frequencies(prior: Tensor | None, classes: int) -> Tensor:
    if prior is None:
        return torch.full((classes,), 1 / classes)
    if prior.shape != (classes,):
        raise InputError(f"prior must have one frequency a class, shape ({classes},), got {tuple(prior.shape)}")
    prior = prior.detach().double()
    if not (prior >= 0).all() or not 0 < prior.sum() < float("inf"):
        raise InputError(f"prior must hold class frequencies, numbers >= 0 with a sum > 0, got {prior.tolist()}")
    return (prior / prior.sum()).to(torch.get_default_dtype())
