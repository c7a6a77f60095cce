"""What each method computes: its formulas written out as loops over plain floats, its limits, and the loss."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ccssl.credal import Levels, credal_loss, relaxation_loss
from ccssl.credal.reference import project_reference
from ccssl.methods import METHODS, Target, unlabeled_loss
from ccssl.methods.alignment import Alignment

K, U, B = 4, 25, 20
PRIOR = [0.5, 0.25, 0.125, 0.125]  # exact in single precision, in which it is kept


def make(name, **options):
    cls = METHODS[name]
    return cls(K, U, cls.Config(**options), torch.tensor(PRIOR, dtype=torch.float64)).double()


def batches(n, scale=2.0):
    """Weak and strong logits (B, K), and places in the pool, some of them twice."""
    rng = np.random.default_rng(n)
    for _ in range(n):
        yield scale * rng.normal(size=(B, K)), scale * rng.normal(size=(B, K)), rng.integers(U, size=B)


def run(method, weak, strong, index):
    target = method.target(torch.tensor(weak), torch.tensor(strong), torch.tensor(index))
    return target.probabilities.numpy(), target.weight.tolist(), target.possibility


def softmax(z):
    e = [math.exp(x - max(z)) for x in z]
    return [x / sum(e) for x in e]


def argmax(p):
    return max(range(len(p)), key=lambda k: p[k])


def certain(k):
    return [float(j == k) for j in range(K)]


def nearest(q, label, alpha):
    """The distribution with p(label) >= 1 - alpha that is nearest to q."""
    if q[label] >= 1 - alpha:
        return q
    rest = sum(q) - q[label]
    return [1 - alpha if k == label else alpha * q[k] / rest for k in range(K)]


class Memory:
    """The running mean of alignment, as a list."""

    def __init__(self, size):
        self.means = [[1 / K] * K for _ in range(size)]

    def align(self, q):
        mean = [sum(column) / len(self.means) for column in zip(*self.means, strict=True)]
        raised = [q[k] * (PRIOR[k] + 1e-6) / (mean[k] + 1e-6) for k in range(K)]
        return [x / sum(raised) for x in raised]

    def add(self, rows):
        self.means = [*self.means[1:], [sum(column) / len(rows) for column in zip(*rows, strict=True)]]


def compare(found, expected):
    np.testing.assert_allclose(found[0], [p for p, _ in expected], rtol=0, atol=1e-12)
    assert found[1] == [float(weight) for _, weight in expected]


def some_but_not_all(weights):
    assert 0 < sum(weights) < len(weights), "a threshold that nothing fails, or nothing passes, tests nothing"


def test_supervised_leaves_everything_out():
    for weak, strong, index in batches(2):
        compare(run(make("supervised"), weak, strong, index), [(softmax(z), 0) for z in weak])


@pytest.mark.parametrize("threshold", [0.0, 0.7])
def test_pseudo_label(threshold):
    for weak, strong, index in batches(3):
        found = run(make("pseudo-label", threshold=threshold), weak, strong, index)
        compare(found, [(certain(argmax(z)), max(softmax(z)) >= threshold) for z in weak])
        if threshold:
            some_but_not_all(found[1])


@pytest.mark.parametrize(("threshold", "temperature"), [(0.8, 0.5), (0.7, 1.0)])
def test_uda(threshold, temperature):
    for weak, strong, index in batches(3):
        found = run(make("uda", threshold=threshold, temperature=temperature), weak, strong, index)
        sharp = [softmax(z / temperature) for z in weak]
        compare(found, [(p, max(p) >= threshold) for p in sharp])
        some_but_not_all(found[1])


@pytest.mark.parametrize(("threshold", "temperature"), [(0.95, 1.0), (0.95, 0.5), (0.6, 1.0)])
def test_fixmatch(threshold, temperature):
    for weak, strong, index in batches(3):
        found = run(make("fixmatch", threshold=threshold, temperature=temperature), weak, strong, index)
        compare(found, [(certain(argmax(z)), max(softmax(z / temperature)) >= threshold) for z in weak])
        some_but_not_all(found[1])


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("size", [1, 3, 128])
def test_fixmatch_with_alignment(size, hard):
    method, memory = make("fixmatch-da", threshold=0.8, temperature=0.5, hard=hard, memory=size), Memory(size)
    changed = 0
    for weak, strong, index in batches(6):
        q = [softmax(z / 0.5) for z in weak]
        aligned = [memory.align(row) for row in q]
        memory.add(q)
        found = run(method, weak, strong, index)
        compare(found, [(certain(argmax(p)) if hard else p, max(p) >= 0.8) for p in aligned])
        some_but_not_all(found[1])
        changed += sum(argmax(p) != argmax(row) for p, row in zip(aligned, q, strict=True))
    assert changed, "alignment that changes no label tests nothing"


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("threshold", [0.95, 0.7])
def test_flexmatch(threshold, warmup):
    method, remembered = make("flexmatch", threshold=threshold, warmup=warmup), {}
    thresholds = set()
    for weak, strong, index in batches(12):
        count = Counter(remembered.values())
        most = max([*count.values(), U - len(remembered) if warmup else 0, 1])
        status = [count[k] / most for k in range(K)]
        least = [threshold * b / (2 - b) for b in status]
        thresholds |= set(least)
        expected = []
        for z, item in zip(weak, index, strict=True):
            label, confidence = argmax(z), max(softmax(z))
            expected.append((certain(label), confidence >= least[label]))
            if confidence >= threshold:
                remembered[item] = label
        compare(run(method, weak, strong, index), expected)
        assert method.remembered.tolist() == [remembered.get(item, -1) for item in range(U)]
        assert method.counts.tolist() == [Counter(method.remembered.tolist())[k] for k in range(-1, K)]
    assert len(thresholds) > 10, "thresholds that do not move test nothing"


def test_flexmatch_starts_with_every_prediction_and_ends_with_fixmatch():
    for warmup in (True, False):
        method = make("flexmatch", warmup=warmup)
        assert method.thresholds().tolist() == [0] * K
        sure = torch.tensor([[9.0, 0, 0, 0]], dtype=torch.float64)
        method.target(sure, sure, torch.tensor([7]))
        b = 1 / (U - 1) if warmup else 1.0
        expected = torch.tensor([0.95 * b / (2 - b), 0, 0, 0], dtype=torch.float64)
        torch.testing.assert_close(method.thresholds(), expected)
        for item in range(U - 1):  # the pool less one item, all classes alike
            method.target(sure.roll(item % K), sure, torch.tensor([item]))
        torch.testing.assert_close(method.thresholds(), torch.full((K,), 0.95, dtype=torch.float64))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, K - 1), st.booleans()), min_size=1, max_size=9),
    st.booleans(),
)
def test_flexmatch_remembers_the_last_confident_label_of_an_item(rows, split):
    """However often an item comes in one batch, and as if its rows had come one by one."""
    method, remembered = METHODS["flexmatch"](K, 4), {}
    weak = torch.tensor([certain(label) for _, label, _ in rows])
    weak = weak * torch.tensor([[10.0 if sure else 0.1] for *_, sure in rows])
    index = torch.tensor([item for item, *_ in rows])
    for part in (slice(0, 4), slice(4, None)) if split and len(rows) > 4 else (slice(None),):
        method.target(weak[part], weak[part], index[part])
    for item, label, sure in rows:
        if sure:
            remembered[item] = label
    assert method.remembered.tolist() == [remembered.get(item, -1) for item in range(4)]
    assert method.counts.tolist() == [4 - len(remembered), *(Counter(remembered.values())[k] for k in range(K))]


@pytest.mark.parametrize(("size", "least"), [(1, 1e-3), (4, 0.3), (128, 1e-3)])
def test_cssl(size, least):
    method, memory = make("cssl", memory=size, least_alpha=least), Memory(size)
    kinds, floor = set(), 0
    for weak, strong, index in batches(6, scale=3.0):
        q = [softmax(z) for z in weak]
        aligned = [memory.align(row) for row in q]
        memory.add(q)
        alpha = [max(1 - max(row), least) for row in aligned]
        labels = [argmax(row) for row in q]
        found = run(method, weak, strong, index)
        against = [softmax(z) for z in strong]
        compare(found, [(nearest(*each), 1) for each in zip(against, labels, alpha, strict=True)])
        pi = [[1.0 if k == y else a for k in range(K)] for y, a in zip(labels, alpha, strict=True)]
        np.testing.assert_allclose(found[2].numpy(), pi, rtol=0, atol=1e-12)
        kinds |= {s[y] >= 1 - a for s, y, a in zip(against, labels, alpha, strict=True)}
        kinds |= {("other class", argmax(row) != y) for row, y in zip(aligned, labels, strict=True)}
        floor += alpha.count(least)
    assert kinds == {True, False, ("other class", True), ("other class", False)}
    assert floor or size != 4, "the least alpha is met"


def p_value(score, q, label, held_out):
    def alpha(row, y):
        rival = max(row[j] for j in range(K) if j != y)
        return rival - row[y] if score is None else rival / (row[y] + score)

    return (sum(alpha(row, y) >= alpha(q, label) for row, y in held_out) + 1) / (len(held_out) + 1)


@pytest.mark.parametrize("normalization", ["proportional", "top"])
@pytest.mark.parametrize("gamma", [None, 0.1, 1.0])
def test_ccssl(gamma, normalization):
    options = {"normalization": normalization} | ({} if gamma is None else {"gamma": gamma})
    method = make("ccssl-diff" if gamma is None else "ccssl-prop", **options)
    rng = np.random.default_rng(5)
    unsure = 0
    for weak, strong, index in batches(3):
        logits, labels = 2 * rng.normal(size=(15, K)), rng.integers(K, size=15)
        method.calibrate(torch.tensor(logits), torch.tensor(labels))
        held_out = [(softmax(z), y) for z, y in zip(logits, labels, strict=True)]
        pi = []
        for q in map(softmax, weak):
            row = [p_value(gamma, q, y, held_out) for y in range(K)]
            top = argmax(q)
            most = max(row)
            pi.append([1.0 if k == top else p for k, p in enumerate(row)] if normalization == "top" else
                      [p / most for p in row])  # fmt: skip
        found = run(method, weak, strong, index)
        assert isinstance(found[2], Levels)
        np.testing.assert_allclose(found[2].dense(torch.float64).numpy(), pi, rtol=0, atol=1e-15)
        expected = project_reference(torch.tensor(strong).softmax(-1), torch.tensor(pi, dtype=torch.float64))
        compare(found, [(p, 1) for p in expected.tolist()])
        unsure += sum(p == 1 / 16 for row in pi for p in row)
    assert unsure or normalization == "proportional"


def test_alignment_alone():
    frequencies = torch.tensor([0.7, 0.2, 0.1, 0.0])
    q = torch.randn(50, K, generator=torch.Generator().manual_seed(0)).softmax(-1)
    uniform = Alignment(torch.full((K,), 1 / K), memory=3)
    torch.testing.assert_close(uniform(q), q)  # no class is rarer than it should be
    alignment = Alignment(frequencies, memory=2)
    before = alignment.history.clone()
    alignment(q)
    assert torch.equal(alignment.history, before)
    for mean in ([1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 0.5, 0.5]):
        alignment.update(torch.tensor([mean, mean]))
    assert alignment.history.tolist() == [[0, 1, 0, 0], [0, 0, 0.5, 0.5]]
    certain_of_an_unseen_class = alignment(torch.tensor([[0.0, 0, 0, 1.0]]))
    torch.testing.assert_close(certain_of_an_unseen_class, torch.tensor([[0.0, 0, 0, 1.0]]))
    never_predicted = alignment(torch.tensor([[0.5, 0.5, 0, 0]]))  # class 0: often labeled, not predicted of late
    assert never_predicted[0, 0] > 0.999
    assert alignment(q).isfinite().all()


def test_a_model_that_neglects_a_class_is_aligned_to_the_frequencies():
    alignment = Alignment(torch.tensor(PRIOR), memory=1)
    q = (torch.randn(4000, K, generator=torch.Generator().manual_seed(0)) * 0.1).softmax(-1)
    alignment.update(q)
    torch.testing.assert_close(alignment(q).mean(0), torch.tensor(PRIOR), atol=2e-3, rtol=0)


class TestLimits:
    def test_fixmatch_without_threshold_is_pseudo_label(self):
        for given_ in batches(2):
            one, two = run(make("fixmatch", threshold=0.0), *given_), run(make("pseudo-label"), *given_)
            assert (one[0] == two[0]).all()
            assert one[1] == two[1]

    def test_uda_with_little_temperature_is_pseudo_label(self):
        for given_ in batches(2):
            sharp, hard = run(make("uda", temperature=1e-5), *given_), run(make("pseudo-label"), *given_)
            np.testing.assert_allclose(sharp[0], hard[0], atol=1e-6)
            assert sharp[1] == hard[1]

    def test_cssl_that_leaves_all_open_learns_nothing(self):
        strong = torch.randn(B, K, dtype=torch.float64, requires_grad=True)
        weak = torch.randn(B, K, dtype=torch.float64)
        target = make("cssl", least_alpha=1.0).target(weak, strong, torch.arange(B))
        loss = unlabeled_loss(strong, target)
        loss.backward()
        assert abs(loss) < 1e-15
        assert strong.grad.abs().max() < 1e-15

    def test_ccssl_that_no_calibration_item_contradicts_learns_nothing(self):
        method = make("ccssl-prop")
        worst = torch.tensor([[0.0, 50.0, 0, 0]] * 30, dtype=torch.float64)
        method.calibrate(worst, torch.zeros(30, dtype=torch.int64))  # every true label was deemed impossible
        strong = torch.randn(B, K, dtype=torch.float64)
        target = method.target(torch.randn(B, K, dtype=torch.float64), strong, torch.arange(B))
        torch.testing.assert_close(target.probabilities, strong.softmax(-1), rtol=0, atol=1e-15)


class TestUnlabeledLoss:
    def distributions(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        strong = 3 * torch.randn(B, K, generator=generator, dtype=torch.float64)
        p = (2 * torch.randn(B, K, generator=generator, dtype=torch.float64)).softmax(-1)
        p[:5] = torch.eye(K, dtype=torch.float64)[[0, 1, 2, 3, 0]]
        return strong.requires_grad_(), Target(p, torch.rand(B, generator=generator, dtype=torch.float64))

    def test_is_the_weighted_divergence(self):
        strong, target = self.distributions()
        total = 0.0
        for z, p, w in zip(strong.tolist(), target.probabilities.tolist(), target.weight.tolist(), strict=True):
            total += w * sum(a * math.log(a / b) for a, b in zip(p, softmax(z), strict=True) if a > 0)
        loss = unlabeled_loss(strong, target)
        assert loss.item() == pytest.approx(total / B, abs=1e-14)
        loss.backward()
        expected = target.weight[:, None] * (strong.detach().softmax(-1) - target.probabilities) / B
        torch.testing.assert_close(strong.grad, expected, rtol=0, atol=1e-15)

    def test_hard_targets_give_the_cross_entropy(self):
        strong, _ = self.distributions()
        label = torch.arange(B) % K
        target = Target(torch.eye(K, dtype=torch.float64)[label], torch.ones(B, dtype=torch.float64))
        torch.testing.assert_close(unlabeled_loss(strong, target), torch.nn.functional.cross_entropy(strong, label))

    @pytest.mark.parametrize("name", ["cssl", "ccssl-diff", "ccssl-prop"])
    def test_credal_methods_have_the_credal_loss(self, name):
        method = make(name)
        if method.uses_calibration:
            weak, _, _ = next(batches(1))
            method.calibrate(torch.tensor(weak), torch.arange(B) % K)
        for weak, strong, index in batches(3):
            ours = torch.tensor(strong, requires_grad=True)
            theirs = torch.tensor(strong, requires_grad=True)
            target = method.target(torch.tensor(weak), ours, torch.tensor(index))
            loss, expected = unlabeled_loss(ours, target), credal_loss(theirs, target.possibility)
            if name == "cssl":
                alpha = target.possibility.amin(-1)
                closed = relaxation_loss(theirs, target.possibility.argmax(-1), alpha)
                torch.testing.assert_close(closed, expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
            loss.backward()
            expected.backward()
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)

    def test_items_of_weight_0_count_in_the_mean_only(self):
        strong, target = self.distributions()
        none = target._replace(weight=torch.zeros(B, dtype=torch.float64))
        loss = unlabeled_loss(strong, none)
        loss.backward()
        assert loss == 0
        assert (strong.grad == 0).all()
        half = target._replace(weight=(torch.arange(B) < B // 2).double())
        first = Target(*(tensor[: B // 2] for tensor in half[:2]))
        torch.testing.assert_close(unlabeled_loss(strong, half), unlabeled_loss(strong[: B // 2], first) / 2)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_and_extremes(self, dtype):
        strong = torch.tensor([[6e4, -6e4, 0, 0], [1, 2, 3, 4]], dtype=dtype, requires_grad=True)
        target = Target(torch.tensor([[0.0, 1, 0, 0], [0.25, 0.25, 0.25, 0.25]]), torch.ones(2))
        loss = unlabeled_loss(strong, target)
        loss.backward()
        assert loss.dtype == torch.float32
        assert loss.isfinite()
        torch.testing.assert_close(strong.grad[0], torch.tensor([0.5, -0.5, 0, 0], dtype=dtype))

    def test_no_gradient_reaches_the_target(self):
        strong, target = self.distributions()
        p, weight = (tensor.requires_grad_() for tensor in target[:2])
        unlabeled_loss(strong, Target(p, weight)).backward()
        assert p.grad is None
        assert weight.grad is None
