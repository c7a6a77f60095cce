"""A training step: what it changes, what it must not read, and that every method passes through it."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy import CLASSES, Flat, Normed, make, toy_config, toy_data

from ccssl import metrics
from ccssl.credal.reference import project_reference
from ccssl.errors import InputError
from ccssl.experiments.run import method_of, prepare, split_of
from ccssl.images.augment import draw_strong, draw_weak, strong, weak
from ccssl.methods import METHODS
from ccssl.training import batches as purposes
from ccssl.training.batches import CALIBRATION_VIEW, Stream, generator
from ccssl.training.loop import NonFiniteLoss, find_device, find_precision, weight_groups
from ccssl.training.schedule import cosine


def training(network=Flat, **changes):
    config, data = toy_config(**changes), toy_data()
    return prepare(config, data, split_of(config, data), make(network))


def advance(training, until):
    for _ in training.run(until):
        pass
    return training


class Reads(TorchDispatchMode):
    """Notes every operation that hands a value from the device to the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __enter__(self):
        tolist = torch.Tensor.tolist  # on the CPU it does not pass through the dispatcher
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(torch.Tensor, "tolist", lambda tensor: self.found.append("tolist") or tolist(tensor))
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.undo()
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in (
            "_local_scalar_dense",
            "nonzero",
            "is_nonzero",
            "equal",
            "masked_select",
        ):
            self.found.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("teacher", ["model", "snapshot", "ema"])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_reads_nothing_from_the_device(method, teacher):
    ours = training(Normed, method=method, teacher=teacher)
    batches = [ours.batches.at(step) for step in range(4)]
    ours.step(batches[0])
    with Reads() as reads:
        for batch in batches[1:]:  # step 3 refreshes the calibration, too
            ours.step(batch)
    assert reads.found == []


def test_the_probe_sees_a_read_where_there_is_one():
    ours = advance(training(), 1)
    for read in (ours.check, ours.losses):
        with Reads() as reads:
            read()
        assert reads.found


@pytest.mark.parametrize("method", METHODS)
def test_a_step_moves_weights_average_and_nothing_else(method):
    ours = training(Normed, method=method)
    before = {name: tensor.clone() for name, tensor in ours.tensors().items()}
    advance(ours, 2)
    after = ours.tensors()
    for name in ("model.network.layers.1.weight", "ema.network.layers.1.weight"):
        assert not torch.equal(before[name], after[name])
    assert torch.equal(before["model.mean"], after["model.mean"])
    assert all(torch.isfinite(tensor).all() for tensor in after.values() if tensor.is_floating_point())


def test_supervised_training_is_plain_sgd():
    ours = training(method="supervised", ema=0.0, weight_decay=0.01)
    twin = make(Flat)
    optimizer = torch.optim.SGD(weight_groups(twin, 0.01), lr=0.03, momentum=0.9, nesterov=True)
    for step in range(3):
        batch = ours.batches.at(step)
        images = weak(batch.labeled.images, batch.labeled.view).permute(0, 3, 1, 2).float()
        for group in optimizer.param_groups:
            group["lr"] = 0.03 * cosine(step, 12)
        optimizer.zero_grad()
        images = (images - ours.network.mean) * ours.network.scale
        torch.nn.functional.cross_entropy(twin(images), batch.labeled.labels).backward()
        optimizer.step()
        ours.step(batch)
    for found, expected in zip(ours.network.network.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def logits_of(network, images):
    return network(torch.as_tensor(images).permute(0, 3, 1, 2))


def possibility_by_hand(calibrated, labels, weak_logits, gamma=0.1):
    """Return the degrees of ccssl-prop, an item and a class at a time."""

    def score(q, k):
        return max(float(q[j]) for j in range(CLASSES) if j != k) / (float(q[k]) + gamma)

    scores = [score(q, y) for q, y in zip(calibrated.softmax(-1), labels.tolist(), strict=True)]
    p_values = torch.tensor(
        [
            [(sum(a >= score(q, k) for a in scores) + 1) / (len(scores) + 1) for k in range(CLASSES)]
            for q in weak_logits.softmax(-1)
        ],
        dtype=torch.float64,
    )
    return p_values / p_values.max(-1, keepdim=True).values


@pytest.mark.parametrize("method", ["fixmatch", "ccssl-prop"])
def test_semi_supervised_training_is_the_loss_written_out(monkeypatch, method):
    """Which items, views, teacher, target, weight and average: against a twin that shares none of the wiring."""
    options = {"threshold": 0.35} if method == "fixmatch" else {"gamma": 0.1}
    ours = training(method=method, options=options, precision="fp64", lambda_u=0.5, ema=0.5, weight_decay=0.01)
    honest, places_told, weights = ours.method.target, [], []

    def target(weak, strong, index):
        places_told.append(index)
        return honest(weak, strong, index)

    monkeypatch.setattr(ours.method, "target", target)
    twin, average = copy.deepcopy(ours.network), copy.deepcopy(ours.network)
    optimizer = torch.optim.SGD(weight_groups(twin, 0.01), lr=0.03, momentum=0.9, nesterov=True)
    data, split = ours.data, ours.split
    order_l = Stream(len(split.labeled), 0, purposes.LABELED)
    order_u = Stream(len(split.unlabeled), 0, purposes.UNLABELED)
    calibration_labels = torch.from_numpy(data.train_labels[split.calibration])

    def shifted(ids, step, purpose):
        images = torch.from_numpy(data.train_images[ids])
        return weak(images, draw_weak(len(ids), 8, 8, False, generator(0, step, purpose)))

    for step in range(5):
        labeled, places = split.labeled[order_l.at(8 * step, 8)], order_u.at(16 * step, 16)
        unlabeled = split.unlabeled[places]
        draw = draw_strong(16, 8, 8, False, generator(0, step, purposes.STRONG_VIEW))
        strong_q = logits_of(twin, strong(torch.from_numpy(data.train_images[unlabeled]), draw)).softmax(-1)
        with torch.no_grad():
            if method == "fixmatch":
                q = logits_of(twin, shifted(unlabeled, step, purposes.WEAK_VIEW)).softmax(-1)
                weight = (q.max(-1).values >= 0.35).double()
                p = torch.eye(CLASSES, dtype=torch.float64)[q.argmax(-1)]
            else:
                if step % 3 == 0:
                    teacher = copy.deepcopy(twin)
                    calibrated = logits_of(teacher, shifted(split.calibration, step, CALIBRATION_VIEW))
                seen = logits_of(teacher, shifted(unlabeled, step, purposes.WEAK_VIEW))
                pi = possibility_by_hand(calibrated, calibration_labels, seen)
                p = torch.as_tensor(project_reference(strong_q, pi))
                weight = torch.ones(16, dtype=torch.float64)
        weights += weight.tolist()
        kl = (torch.xlogy(p, p) - torch.xlogy(p, strong_q)).sum(-1)
        truth = torch.from_numpy(data.train_labels[labeled])
        log_q = logits_of(twin, shifted(labeled, step, purposes.LABELED_VIEW)).log_softmax(-1)
        for group in optimizer.param_groups:
            group["lr"] = 0.03 * cosine(step, 12)
        optimizer.zero_grad()
        (-log_q[torch.arange(8), truth].mean() + 0.5 * (weight * kl).mean()).backward()
        optimizer.step()
        ours.step(ours.batches.at(step))
        decay = min(0.5, (1 + step) / (10 + step))
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), twin.parameters(), strict=True):
                slow.copy_(decay * slow + (1 - decay) * fast)
        assert places_told[-1].tolist() == places.tolist()
    if method == "fixmatch":
        assert 0 < sum(weights) < len(weights)  # both kinds of items occur
    for found, expected in ((ours.network, twin), (ours.ema.network, average)):
        for a, b in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_pseudo_labels_are_the_teachers_of_weak_views_and_figures_the_averages_of_plain_images():
    ours = training(method="ccssl-prop", precision="fp64", lr=0.3, eval_unlabeled=50, eval_batch=16, validation=16)
    data, split = ours.data, ours.split
    advance(ours, 3)
    teacher = copy.deepcopy(ours.network)  # copied at the beginning of step 3, with the next calibration
    advance(ours, 5)
    calibration_labels = torch.from_numpy(data.train_labels[split.calibration])

    def view(ids, step, purpose):
        images = torch.from_numpy(data.train_images[ids])
        return weak(images, draw_weak(len(ids), 8, 8, False, generator(0, step, purpose)))

    with torch.no_grad():
        found = ours.pseudo_labels()
        ids = split.unlabeled[::4]  # at most 50 of 200
        assert np.array_equal(found.ids, ids)
        assert torch.equal(found.labels, torch.from_numpy(data.train_labels[ids]))
        expected = logits_of(teacher, view(ids, 5, purposes.EVALUATION_VIEW))
        torch.testing.assert_close(found.probabilities, expected.softmax(-1))
        calibrated = logits_of(teacher, view(split.calibration, 3, CALIBRATION_VIEW))
        pi = possibility_by_hand(calibrated, calibration_labels, expected)
        torch.testing.assert_close(found.possibility.dense().double(), pi, rtol=1e-6, atol=0)

        parts = {"test": (data.test_images, data.test_labels)}
        parts["validation"] = (data.train_images[split.validation], data.train_labels[split.validation])
        for part, (images, labels) in parts.items():
            probabilities, truth, possibility = ours.predictions(part)
            expected = logits_of(ours.ema.network, images)
            torch.testing.assert_close(probabilities, expected.softmax(-1))
            assert truth.tolist() == labels.tolist()
            calibrated = logits_of(ours.ema.network, data.train_images[split.calibration])
            pi = possibility_by_hand(calibrated, calibration_labels, expected)
            torch.testing.assert_close(possibility.dense().double(), pi, rtol=1e-6, atol=0)


@pytest.mark.parametrize("teacher", ["model", "ema"])
def test_a_teacher_that_moves_at_every_step_is_calibrated_at_every_step(monkeypatch, teacher):
    """Calibration and unlabeled items are scored by the same weights, in training and in the figures of it."""
    ours = training(Normed, method="ccssl-prop", teacher=teacher, calibrate_every=10, lr=0.3)
    teach, predict, steps = ours.teach, ours._predict, []

    def scores():
        fresh = copy.deepcopy(ours.method)
        ours.calibrate(fresh, ours.teaching_network, ours.steps_done)
        return fresh.calibration.scores

    def watched(images):
        steps.append(torch.equal(ours.method.calibration.scores, scores()))
        return teach(images)

    def watched_figures(network, *rest):
        assert network is ours.teaching_network
        steps.append(torch.equal(ours.method.calibration.scores, scores()))
        return predict(network, *rest)

    monkeypatch.setattr(ours, "teach", watched)
    monkeypatch.setattr(ours, "_predict", watched_figures)
    advance(ours, 4)
    first = scores()
    ours.pseudo_labels()
    assert steps == [True] * 5
    advance(ours, 5)
    assert steps == [True] * 6
    assert not torch.equal(first, scores())  # it does move


def test_the_scaler_changes_nothing_and_comes_back():
    """Powers of two are exact: with fp16 they only keep small gradients from vanishing."""
    plain, scaled, again = (training(method="fixmatch") for _ in range(3))
    scaled.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    for ours in (plain, scaled):
        advance(ours, 5)
    for a, b in zip(plain.network.parameters(), scaled.network.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert scaled.scaler.get_scale() == 2.0**14
    again.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    again.load(scaled.tensors(), json.loads(json.dumps(scaled.state())))
    assert again.scaler.state_dict() == scaled.scaler.state_dict()


def test_decay_spares_biases_and_norms():
    decayed, spared = weight_groups(make(Normed), 0.1)
    assert decayed["weight_decay"] == 0.1
    assert spared["weight_decay"] == 0
    assert all(parameter.ndim > 1 for parameter in decayed["params"])
    assert len(decayed["params"]) == 2
    assert len(spared["params"]) == 4


def test_calibration_items_are_scored_by_the_teacher_on_weak_views(monkeypatch):
    """The same network, mode and augmentation as for unlabeled items, and calibration items never among those."""
    ours = training(Normed, method="ccssl-prop")
    split = ours.split
    assert not set(split.calibration) & (set(split.unlabeled) | set(split.labeled) | set(split.validation))
    seen = {}
    monkeypatch.setattr(ours.method, "calibrate", lambda logits, labels: seen.update(logits=logits, labels=labels))
    ours.refresh(3)
    images = torch.from_numpy(ours.data.train_images[split.calibration])
    draw = draw_weak(len(images), 8, 8, False, generator(0, 3, CALIBRATION_VIEW))
    expected = ours.teach(weak(images, draw))
    assert torch.equal(seen["logits"], expected)
    assert torch.equal(seen["labels"], torch.from_numpy(ours.data.train_labels[split.calibration]))
    assert not torch.equal(seen["logits"], ours.teach(images))
    assert torch.equal(ours.snapshot.network.layers[1].weight, ours.network.network.layers[1].weight)


def test_the_snapshot_stays_until_the_next_refresh():
    ours = advance(training(method="ccssl-diff"), 2)  # refreshed at step 0
    first = make(Flat).layers[1].weight
    assert torch.equal(ours.snapshot.network.layers[1].weight, first)
    third = ours.network.network.layers[1].weight
    advance(ours, 3)
    assert torch.equal(ours.snapshot.network.layers[1].weight, first)
    third = third.clone()
    advance(ours, 4)  # refreshed at step 3
    assert torch.equal(ours.snapshot.network.layers[1].weight, third)


def test_evaluation_changes_nothing_that_training_depends_on():
    one, two = training(Normed, method="fixmatch-da"), training(Normed, method="fixmatch-da")
    torch.manual_seed(1)
    advance(one, 4)
    torch.manual_seed(1)
    advance(two, 2)
    before = torch.get_rng_state()
    two.evaluate()
    torch.set_rng_state(before)
    advance(two, 4)
    assert one.tensors().keys() == two.tensors().keys()
    assert all(torch.equal(tensor, two.tensors()[name]) for name, tensor in one.tensors().items())


@pytest.mark.parametrize("method", METHODS)
def test_figures_are_those_of_the_averaged_network(method):
    ours = advance(training(method=method, validation=16), 3)
    found = ours.evaluate()
    images = torch.from_numpy(ours.data.test_images).permute(0, 3, 1, 2)
    probabilities = ours.ema.network(images).softmax(-1)
    labels = torch.from_numpy(ours.data.test_labels)
    assert found["test"]["accuracy"] == metrics.evaluate(probabilities, labels)["accuracy"]
    assert set(found) == {"test", "validation"} | ({"unlabeled"} if METHODS[method].uses_unlabeled else set())
    credal = method in ("cssl", "ccssl-diff", "ccssl-prop")
    assert ("validity_error@0.1" in found["test"]) == credal


def test_a_run_learns():
    ours = advance(training(method="ccssl-prop", steps=150, labels=40, lr=0.1), 150)
    assert ours.evaluate()["test"]["accuracy"] > 0.9
    assert 1 / CLASSES <= ours.evaluate()["unlabeled"]["efficiency"] <= 1


def test_a_loss_that_is_not_finite_is_found_with_its_step_and_images():
    ours = advance(training(method="supervised"), 3)
    with torch.no_grad():
        ours.network.network.layers[1].weight.fill_(torch.nan)
    advance(ours, 6)
    labeled, _ = ours.batches.ids(3)
    with pytest.raises(NonFiniteLoss, match=f"at step 3, with labeled images {labeled[0]}, {labeled[1]}"):
        ours.check()


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_weights_that_a_finite_loss_spoiled_are_found(average, value):
    ours = advance(training(method="supervised"), 3)
    ours.check()
    with torch.no_grad():
        (ours.ema.network if average else ours.network).network.layers[3].bias[0] = value
    with pytest.raises(NonFiniteLoss, match="at step 3 the weights were not finite"):
        ours.check()


def test_predictions_that_are_no_numbers_are_found():
    ours = advance(training(method="supervised"), 2)
    with torch.no_grad():
        for parameter in ours.ema.network.parameters():
            parameter.mul_(1e18)
        ours.ema.network.network.layers[3].weight.mul_(1e18)
    with pytest.raises(NonFiniteLoss, match="at step 2 the network's predictions were no numbers"):
        ours.evaluate()


class Masked(Flat):
    """A network that masks with infinity: buffers may hold what weights may not."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((2,), -torch.inf))


def test_a_mask_of_infinities_is_no_fault():
    advance(training(Masked, method="supervised"), 2).check()


class Wide(Flat):
    """A network with a logit too many."""

    def __init__(self):
        super().__init__()
        self.layers[3] = nn.Linear(32, CLASSES + 1)


class Pair(Flat):
    """A network that answers with features, too."""

    def forward(self, images):
        return super().forward(images), images


class Noisy(Flat):
    """A network that draws at random in evaluation, too."""

    def forward(self, images):
        return super().forward(images) + torch.rand(()) + np.random.rand()  # noqa: NPY002


@pytest.mark.parametrize(
    ("network", "told"), [(Wide, r"logits of shape \(2, 4\).*, got \(2, 5\)"), (Pair, "got tuple")]
)
def test_a_network_that_does_not_give_a_logit_a_class_is_refused(network, told):
    with pytest.raises(InputError, match=told):
        training(network)


def test_trying_a_network_costs_no_random_number_and_no_mode():
    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist()  # noqa: NPY002

    training(Flat)
    expected = draw()
    ours = training(Noisy)
    assert draw() == expected
    assert ours.network.training


class Extra(Flat):
    """A network with state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.told = {"seen": [1, 2]}

    def get_extra_state(self):
        return self.told

    def set_extra_state(self, state):
        self.told = state


def test_state_that_is_no_tensor_comes_back_or_is_refused():
    one, two = training(Extra), training(Extra)
    one.network.network.told = {"seen": [3]}
    assert all(isinstance(value, torch.Tensor) for value in one.tensors().values())
    two.load(one.tensors(), json.loads(json.dumps(one.state())))
    assert two.network.network.told == {"seen": [3]}

    class Odd(Extra):
        def get_extra_state(self):
            return {1, 2}

    with pytest.raises(InputError, match=r"keeps network\._extra_state, a set, which no checkpoint can hold"):
        training(Odd)


def test_a_teacher_in_evaluation_mode_leaves_the_network_in_training_mode():
    ours = training(Normed, method="ccssl-prop", teacher="model")
    ours.network.train()
    ours.teach(torch.zeros(2, 8, 8, 1, dtype=torch.uint8))
    assert ours.network.training


def test_prior_counts_all_labels():
    config, data = toy_config(label_sampling="iid", labels=30), toy_data()
    split = split_of(config, data)
    ids = np.concatenate([split.labeled, split.calibration])
    expected = np.bincount(data.train_labels[ids], minlength=CLASSES) / 30
    np.testing.assert_allclose(method_of(config, data, split).prior.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"lr": float("nan")}, "lr must be a finite number"),
        ({"ema": 1.0}, "ema must be a decay"),
        ({"teacher": "me"}, "teacher must be one of model, snapshot, ema"),
        ({"precision": "fp8"}, "precision must be one of auto"),
        ({"method": "fixmach"}, "Did you mean fixmatch"),
        ({"model": "wrn-28-3"}, "Did you mean wrn-28-"),
        ({"options": {"gama": 1}}, "Did you mean gamma"),
        ({"select": "best"}, "give validation"),
        ({"calibration_fraction": 1.0}, "calibration_fraction must lie in"),
    ],
)
def test_bad_configurations_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        toy_config(**changes)


def test_devices_and_precisions_that_are_not_here_are_refused():
    cpu = torch.device("cpu")
    assert find_precision("auto", cpu) in ("fp32", "bf16")
    with pytest.raises(InputError, match="fp16 needs an accelerator"):
        find_precision("fp16", cpu)
    with pytest.raises(InputError, match="device must be"):
        find_device("gpu0")
    with pytest.raises(InputError, match="not here"):
        find_device("cuda:99")


def test_bf16_trains():
    ours = advance(training(Normed, precision="bf16", method="ccssl-diff"), 4)
    assert ours.network.network.layers[1].weight.dtype == torch.float32
    assert ours.evaluate()["test"]["nll"] < 10
