"""One contract for every method: what the training loop relies on, and that broken methods do not pass."""

import copy
import dataclasses
import functools
import io
from typing import NamedTuple

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ccssl import collective
from ccssl.credal import Levels, contains, project_logits
from ccssl.errors import InputError
from ccssl.methods import METHODS, Method, unlabeled_loss
from ccssl.methods.ccssl import CCSSLProp
from ccssl.methods.config import CONFIGS
from ccssl.methods.cssl import CSSL
from ccssl.methods.fixmatch import FixMatch, FixMatchDA

K, U, B, L = 4, 30, 16, 20  # classes, pool, batch, calibration items

# Every member of METHODS appears here, with what is put under contract besides its defaults.
OPTIONS = {
    "supervised": [],
    "pseudo-label": [{"threshold": 0.7}],
    "uda": [{"threshold": 0.0, "temperature": 1.0}],
    "fixmatch": [{"threshold": 0.6, "temperature": 0.5}],
    "fixmatch-da": [{"threshold": 0.5, "memory": 2}, {"hard": True, "threshold": 0.5}],
    "flexmatch": [{"threshold": 0.5, "warmup": False}],
    "cssl": [{"memory": 1}, {"least_alpha": 1.0}],
    "ccssl-diff": [{"normalization": "top"}],
    "ccssl-prop": [{"gamma": 0.0}, {"gamma": 1.0, "normalization": "top"}],
}
MEMBERS = [(name, options) for name, many in OPTIONS.items() for options in [{}, *many]]
PRIOR = torch.tensor([4.0, 3.0, 2.0, 1.0])

over_members = pytest.mark.parametrize(
    ("name", "options"), MEMBERS, ids=lambda value: value if isinstance(value, str) else str(value)
)


def make(cls, options, dtype=torch.float32, prior=PRIOR):
    """A method, calibrated where it has to be."""
    method = cls(K, U, cls.Config(**options), prior).to(dtype)
    if method.uses_calibration:
        generator = torch.Generator().manual_seed(99)
        logits = 2 * torch.randn(L, K, generator=generator, dtype=torch.float64)
        guess = (logits + torch.randn(L, K, generator=generator, dtype=torch.float64)).argmax(-1)
        method.calibrate(logits.to(dtype), guess)
    return method


class Batch(NamedTuple):
    weak: torch.Tensor
    strong: torch.Tensor
    index: torch.Tensor


def batch(seed, scale=3.0, dtype=torch.float32, rows=B):
    """Logits of two views that have nothing in common, and places in the pool with some of them twice."""
    generator = torch.Generator().manual_seed(seed)
    weak, strong = scale * torch.randn(2, rows, K, generator=generator, dtype=torch.float64).to(dtype)
    return Batch(weak, strong, torch.randint(U, (rows,), generator=generator))


def dense(pi):
    return pi.dense(torch.float64) if isinstance(pi, Levels) else pi


def state(method):
    return {name: tensor.clone() for name, tensor in method.state_dict().items()}


def same(a, b):
    """Whether two targets, or two states, are equal bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    pi = (a.possibility is None) == (b.possibility is None)
    pi = pi and (a.possibility is None or torch.equal(dense(a.possibility), dense(b.possibility)))
    return pi and torch.equal(a.probabilities, b.probabilities) and torch.equal(a.weight, b.weight)


class HostReads(TorchDispatchMode):
    """Refuses operations that make the host wait for the device."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique", "bincount")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0].removesuffix("2")
        assert name not in self.READS, f"{name} reads from the device"
        mask = name in ("index", "index_put", "index_put_") and any(
            place is not None and place.dtype in (torch.bool, torch.uint8) for place in args[1]
        )
        assert not mask, f"{name} with a mask reads from the device"
        return func(*args, **(kwargs or {}))


def check_targets(cls, options):
    """Targets are distributions, weights in [0, 1], whatever the logits; nothing given is changed."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        wide = torch.promote_types(dtype, torch.float32)
        tolerance = max(8 * torch.finfo(wide).eps, 1e-11)  # a logarithm of 1e4 is known to 1e-12 in float64
        method = make(cls, options, wide)
        for scale in (0.0, 0.1, 3.0, 1e4):
            given = batch(int(scale), scale, dtype)
            given = Batch(given.weak.requires_grad_(), given.strong.requires_grad_(), given.index)
            kept = [tensor.detach().clone() for tensor in given]
            p, weight, pi = method.target(*given)
            assert p.shape == (B, K), "a distribution for each item"
            assert weight.shape == (B,), "a weight for each item"
            assert p.dtype == weight.dtype == wide, "targets are computed in float32 at least"
            assert not p.requires_grad, "no gradient passes through a target"
            assert not weight.requires_grad, "no gradient passes through a weight"
            assert (p >= 0).all(), "targets are distributions"
            assert ((p.sum(-1) - 1).abs() < tolerance).all(), "targets are distributions"
            assert ((weight >= 0) & (weight <= 1)).all(), "weights lie in [0, 1]"
            assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True)), "the arguments are not changed"
            if pi is not None:
                assert pi.shape == (B, K), "possibilities for each item"
                assert not getattr(pi, "requires_grad", False), "no gradient passes through possibilities"
                assert (dense(pi).amax(-1) == 1).all(), "some class is fully possible"
                assert contains(p, pi, tolerance).all(), "the target is a member of its credal set"


def check_source(cls, options):
    """The weak view decides; the strong view is only projected."""
    method = make(cls, options)
    for seed in range(3):
        twin = copy.deepcopy(method)
        weak, strong, index = batch(seed)
        other = batch(seed + 50).strong
        one, two = method.target(weak, strong, index), twin.target(weak, other, index)
        assert same(state(method), state(twin)), "what is remembered comes from the weak view"
        assert torch.equal(one.weight, two.weight), "the weight comes from the weak view"
        if one.possibility is None:
            assert torch.equal(one.probabilities, two.probabilities), "the target comes from the weak view"
        else:
            assert torch.equal(dense(one.possibility), dense(two.possibility)), (
                "possibilities come from the weak view"
            )
            for target, logits in ((one, strong), (two, other)):
                nearest = project_logits(logits, target.possibility)
                assert torch.equal(target.probabilities, nearest), "the target is the projection of the strong view"
    renamed = method.target(weak.roll(1, -1), strong, index)
    ignorant = options.get("least_alpha") == 1.0  # nothing is demanded, whatever is predicted
    assert ignorant or not same(renamed, method.target(weak, strong, index)), "the target depends on the weak view"


def check_evaluation(cls, options):
    """``possibility`` says what ``target`` uses, and changes nothing."""
    method = make(cls, options)
    for seed in range(3):
        weak, strong, index = batch(seed)
        before = state(method)
        pi = method.possibility(weak)
        assert same(state(method), before), "possibility() changes nothing"
        target = method.target(weak, strong, index)
        assert (pi is None) == (target.possibility is None), "possibility() is None exactly without a credal set"
        if pi is not None:
            assert torch.equal(dense(pi), dense(target.possibility)), "possibility() says what target() uses"
    if method.uses_calibration:
        assert method.calibrate_every is not None, "what is calibrated grows old"
        assert method.teacher != "model", "calibration items and weak views must have the same teacher"


def check_state(cls, options):
    """A method that is saved and loaded goes on as if nothing had happened."""
    method = make(cls, options)
    for seed in range(4):
        method.target(*batch(seed))
    file = io.BytesIO()
    torch.save(method.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    addresses = [tensor.untyped_storage().data_ptr() for tensor in saved.values() if tensor.numel()]
    assert len(addresses) == len(set(addresses)), "no two buffers share their memory"
    assert all(tensor.is_contiguous() for tensor in saved.values()), "buffers are contiguous"
    loaded = cls(K, U, cls.Config(**options))
    loaded.load_state_dict(saved)
    for seed in range(4, 8):
        assert same(method.target(*batch(seed)), loaded.target(*batch(seed))), "the state survives a checkpoint"
        assert same(state(method), state(loaded)), "the state survives a checkpoint"


def check_reads(cls, options):
    """A step and a calibration never wait for the device."""
    method, given = make(cls, options), batch(0)
    with HostReads():
        target = method.target(*given)
        unlabeled_loss(given.strong, target)
        method.possibility(given.weak)
        if method.uses_calibration:
            method.calibrate(given.weak, given.weak.argmax(-1))


def check_learning(cls, options):
    """In a plain loop the loss falls, and unlabeled items move the weights."""
    alone = supervised_weights()
    weights, losses = train(cls, options)
    assert losses[-1] < losses[0] / 2, "the loss falls"
    moved = max(float((a - b).abs().max()) for a, b in zip(weights, alone, strict=True)) > 1e-3
    ignorant = options.get("least_alpha") == 1.0  # every prediction is in the credal set: nothing to learn
    assert moved == (cls.uses_unlabeled and not ignorant), "unlabeled items move the weights"


@functools.cache
def supervised_weights():
    return train(METHODS["supervised"], {})[0]


def train(cls, options, steps=60):
    """Train on four Gaussian clouds; return the weights, and the cross-entropy of the pool on the way."""
    torch.manual_seed(0)
    centre = 2 * torch.randn(K, 6)
    x, y = centre.repeat(U, 1) + torch.randn(U * K, 6), torch.arange(K).repeat(U)
    labeled, held_out, pool = slice(8), slice(8, 8 + L), slice(8 + L, None)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, K))
    method = cls(K, len(x[pool]), cls.Config(**options))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    losses, noise = [], torch.Generator().manual_seed(1)
    for step in range(steps):
        index = torch.randperm(method.unlabeled, generator=noise)[:B]
        weak = x[pool][index] + 0.1 * torch.randn(B, 6, generator=noise)
        strong = weak + 0.5 * torch.randn(B, 6, generator=noise)
        if method.uses_calibration and step % method.calibrate_every == 0:
            method.calibrate(net(x[held_out]), y[held_out])
        logits = net(strong)
        target = method.target(net(weak), logits, index)
        loss = nn.functional.cross_entropy(net(x[labeled]), y[labeled]) + unlabeled_loss(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(nn.functional.cross_entropy(net(x[pool]), y[pool]).detach()))
    return [weight.detach() for weight in net.parameters()], losses


CHECKS = [check_targets, check_source, check_evaluation, check_state, check_reads, check_learning]


def test_every_method_is_under_contract():
    assert OPTIONS.keys() == METHODS.keys(), "give the new method its options in OPTIONS"
    assert {name: cls.Config for name, cls in METHODS.items()} == CONFIGS
    assert len(set(METHODS.values())) == len(METHODS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@over_members
def test_contract(name, options, check):
    check(METHODS[name], options)


class FromStrong(FixMatch):
    def target(self, weak, strong, index):
        return super().target(strong, strong, index)


class RemembersStrong(FixMatchDA):
    def target(self, weak, strong, index):
        self.alignment.update(strong.softmax(-1))
        return super().target(weak, strong, index)


class CredalFromStrong(CCSSLProp):
    def target(self, weak, strong, index):
        return super().target(strong, strong, index)


class Unprojected(CCSSLProp):
    def target(self, weak, strong, index):
        target = super().target(weak, strong, index)
        return target._replace(probabilities=project_logits(weak, target.possibility))


class Leaking(FixMatch):
    def target(self, weak, strong, index):
        return super().target(weak, strong, index)._replace(probabilities=weak.float().softmax(-1))


class Heavy(FixMatch):
    def target(self, weak, strong, index):
        target = super().target(weak, strong, index)
        return target._replace(weight=2 * target.weight)


class Unnormalised(FixMatch):
    def target(self, weak, strong, index):
        target = super().target(weak, strong, index)
        return target._replace(probabilities=target.probabilities + 0.01)


class Forgetful(FixMatch):
    steps = 0

    def target(self, weak, strong, index):
        self.steps += 1
        target = super().target(weak, strong, index)
        return target._replace(weight=target.weight / self.steps)


class Asking(FixMatch):
    def target(self, weak, strong, index):
        return super().target(weak, strong, index) if weak.isfinite().all() else None


class Masking(FixMatch):
    def target(self, weak, strong, index):
        target = super().target(weak, strong, index)
        target.probabilities[target.weight == 0] = 1 / K
        return target


class Touching(CSSL):
    def possibility(self, logits):
        pi = super().possibility(logits)
        self.alignment.update(logits.float().softmax(-1))
        return pi


class Idle(FixMatch):
    def target(self, weak, strong, index):
        target = super().target(weak, strong, index)
        return target._replace(weight=0 * target.weight)


class Overwriting(FixMatch):
    def target(self, weak, strong, index):
        target = super().target(weak, strong, index)
        weak.detach().sub_(1)
        return target


@pytest.mark.parametrize(
    ("broken", "check", "complaint"),
    [
        (FromStrong, check_source, "the (weight|target) comes from the weak view"),
        (RemembersStrong, check_source, "what is remembered comes from the weak view"),
        (CredalFromStrong, check_source, "possibilities come from the weak view"),
        (Unprojected, check_source, "projection of the strong view"),
        (Leaking, check_targets, "no gradient passes through a target"),
        (Heavy, check_targets, r"weights lie in \[0, 1\]"),
        (Unnormalised, check_targets, "targets are distributions"),
        (Overwriting, check_targets, "the arguments are not changed"),
        (Forgetful, check_state, "the state survives a checkpoint"),
        (Asking, check_reads, "_local_scalar_dense reads from the device"),
        (Masking, check_reads, "index_put_ with a mask reads from the device"),
        (Touching, check_evaluation, "changes nothing"),
        (Idle, check_learning, "unlabeled items move the weights"),
    ],
)
def test_a_broken_method_fails(broken, check, complaint):
    parent = next(name for name, cls in METHODS.items() if cls is broken.__base__)
    options = {} if broken.__base__ in (CCSSLProp, CSSL) else {"threshold": 0.5}
    check(METHODS[parent], options)
    with pytest.raises(AssertionError, match=complaint):
        check(broken, options)


@over_members
def test_under_autocast_targets_are_those_of_full_precision(name, options):
    given = batch(3, dtype=torch.bfloat16)
    expected = make(METHODS[name], options).target(*given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(make(METHODS[name], options).target(*given), expected)


def steps_in_shares():
    """Three steps of every method on this rank's share of each batch, in float64."""
    rank, world = collective.rank(), collective.world()
    results = {}
    for name, options in MEMBERS:
        method = make(METHODS[name], options, torch.float64)
        if method.uses_calibration and rank:  # other figures on the other rank must not matter
            method.calibrate(torch.randn(L, K, dtype=torch.float64), torch.zeros(L, dtype=torch.int64))
        elif method.uses_calibration and world > 1:
            make(METHODS[name], options, torch.float64)
        for seed in range(3):
            given = batch(seed, dtype=torch.float64)
            p, weight, _ = method.target(*(tensor.chunk(world)[rank] for tensor in given))
            results[f"{name} {options} p {seed}"] = p
            results[f"{name} {options} weight {seed}"] = weight
        results |= {f"{name} {options} state {key}": tensor for key, tensor in method.state_dict().items()}
    return results


def test_two_ranks_do_what_one_does(tmp_path):
    alone = steps_in_shares()
    first, second = on_ranks(steps_in_shares, tmp_path)
    assert first.keys() == second.keys() == alone.keys()
    for key, expected in alone.items():
        if "state" in key:
            assert torch.equal(first[key], second[key]), f"{key}: the ranks differ"
            torch.testing.assert_close(first[key], expected, rtol=0, atol=1e-14)
        else:
            torch.testing.assert_close(torch.cat([first[key], second[key]]), expected, rtol=0, atol=1e-12)


FIELDS = [(name, spec.name) for name, cls in METHODS.items() for spec in dataclasses.fields(cls.Config)]


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_hyperparameters_are_documented_and_checked(name, field):
    config = METHODS[name].Config
    spec = next(spec for spec in dataclasses.fields(config) if spec.name == field)
    assert len(spec.metadata["help"]) > 10
    for wrong in (-1, float("nan"), float("inf"), "much", None, [0.5]):
        with pytest.raises(InputError, match=f"{field} must be .*, got "):
            config(**{field: wrong})
    if spec.default is not True and spec.default is not False:
        with pytest.raises(InputError, match=f"{field} must be .*, got True"):
            config(**{field: True})
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config(), field, spec.default)


@pytest.mark.parametrize("name", METHODS)
def test_defaults_and_what_is_refused(name):
    cls = METHODS[name]
    assert make(cls, {}).config == cls(K, U).config == cls.Config()
    torch.testing.assert_close(cls(K, U).prior, torch.full((K,), 1 / K))
    torch.testing.assert_close(cls(K, U, prior=PRIOR).prior, PRIOR / 10)
    if not cls.uses_calibration:
        with pytest.raises(NotImplementedError, match="has no calibration: uses_calibration is False"):
            cls(K, U).calibrate(torch.zeros(1, K), torch.zeros(1))
    with pytest.raises(InputError, match="at least 2 classes to choose from, got 1"):
        cls(1, U)
    with pytest.raises(InputError, match="the size of the unlabeled pool, at least 0, got -1"):
        cls(K, -1)
    with pytest.raises(InputError, match=f"config must be a {cls.Config.__name__} for {cls.__name__}, got dict"):
        cls(K, U, {"threshold": 0.5})
    with pytest.raises(InputError, match=r"one frequency a class, shape \(4,\), got \(3,\)"):
        cls(K, U, prior=torch.ones(3))
    for wrong in ([0.0] * 4, [1.0, -1, 1, 1], [float("nan")] * 4, [float("inf")] * 4):
        with pytest.raises(InputError, match="prior must hold class frequencies"):
            cls(K, U, prior=torch.tensor(wrong))


def test_a_method_must_say_what_its_targets_are():
    class Empty(Method):
        Config = METHODS["supervised"].Config

    with pytest.raises(NotImplementedError, match="Empty must say what the target of an unlabeled item is"):
        Empty(K, U).target(*batch(0))


def test_a_conformal_method_wants_to_be_calibrated_first():
    with pytest.raises(RuntimeError, match="nothing to compare with"):
        METHODS["ccssl-diff"](K, U).target(*batch(0))
