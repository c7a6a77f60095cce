"""A training step: what it changes, what it must not read, and that every method passes through it."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toy import CLASSES, Flat, Normed, make, toy_config, toy_data

from ccssl import metrics
from ccssl.errors import InputError
from ccssl.experiments.run import method_of, prepare, split_of
from ccssl.methods import METHODS
from ccssl.training.batches import CALIBRATION_VIEW
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
        from ccssl.images.augment import weak

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
    from ccssl.images.augment import draw_weak, weak
    from ccssl.training.batches import generator

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
