"""Scorers: equal to PyKEEN's and to products written out, and with the symmetries that set them apart."""

import pytest
import torch

from ccssl.errors import InputError
from ccssl.graphs.scorers import SCORERS, Multiplicative, complex_product, hamilton_product, real_product

E, R, D = 7, 6, 12


def scorer(name, seed=0, **options):
    torch.manual_seed(seed)
    return Multiplicative(SCORERS[name], E, R, D, scale=1.0, **options).double().requires_grad_(False)


def every_query():
    return torch.arange(E).repeat_interleave(R), torch.arange(R).repeat(E)


def every_fact():
    h, r = every_query()
    return h.repeat_interleave(E), r.repeat_interleave(E), torch.arange(E).repeat(E * R)


def numbers(vectors, parts):
    """Return the numbers of vectors, one after another, each as a list of its parts."""
    return vectors.unflatten(-1, (parts, -1)).transpose(-1, -2).tolist()


def written_out(name, h, r, t):
    """Return the score of one fact by the textbook."""
    if name == "distmult":
        return sum(a * b * c for a, b, c in zip(h.tolist(), r.tolist(), t.tolist(), strict=True))
    if name == "complex":
        rows = zip(*([complex(*x) for x in numbers(v, 2)] for v in (h, r, t)), strict=True)
        return sum(a * b * c.conjugate() for a, b, c in rows).real

    # Quaternions as 2x2 complex matrices, a + bi + cj + dk = [[a + bi, c + di], [-c + di, a - bi]]: their product is
    # that of matrices.
    def matrix(v):
        a, b, c, d = torch.tensor(numbers(v, 4), dtype=torch.float64).unbind(-1)
        rows = torch.complex(a, b), torch.complex(c, d), torch.complex(-c, d), torch.complex(a, -b)
        return torch.stack(rows, -1).unflatten(-1, (2, 2))

    product = matrix(h) @ matrix(r)
    first, second = product[:, 0, 0], product[:, 0, 1]
    parts = torch.stack([first.real, first.imag, second.real, second.imag], -1)
    return float((parts * torch.tensor(numbers(t, 4), dtype=torch.float64)).sum())


@pytest.mark.parametrize("normalize", ["none", "unit"])
@pytest.mark.parametrize("name", SCORERS)
def test_scores_by_the_textbook(name, normalize):
    if name == "distmult" and normalize == "unit":
        return
    ours = scorer(name, normalize=normalize)
    h, r = every_query()
    scores, vectors = ours(h, r), ours.relation(torch.arange(R))
    for row, (head, relation) in enumerate(zip(h.tolist(), r.tolist(), strict=True)):
        for tail in range(E):
            expected = written_out(name, ours.entities[head], vectors[relation], ours.entities[tail])
            assert float(scores[row, tail]) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("name", "theirs"), [("distmult", "DistMult"), ("complex", "ComplEx"), ("qmult", "QuatE")])
def test_scores_are_those_of_pykeen(name, theirs):
    """PyKEEN's QuatE is QMult with the other sign, that of its published code."""
    modules = pytest.importorskip("pykeen.nn.modules")
    interaction = getattr(modules, f"{theirs}Interaction")()
    ours = scorer(name)
    h, r, t = every_fact()
    vectors = ours.entities[h], ours.relations[r], ours.entities[t]
    if name == "complex":
        vectors = tuple(torch.complex(*v.chunk(2, -1)) for v in vectors)
    if name == "qmult":
        h, r, t = (v.unflatten(-1, (4, -1)).transpose(-1, -2) for v in vectors)
        vectors, interaction = (h, r, -t), interaction.double()
    torch.testing.assert_close(ours.score(*every_fact()), interaction(*vectors), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SCORERS)
def test_all_tails_at_once_are_the_single_facts(name):
    ours = scorer(name)
    scores = ours(*every_query())
    assert scores.shape == (E * R, E)
    torch.testing.assert_close(ours.score(*every_fact()), scores.flatten())


def test_distmult_cannot_tell_a_fact_from_its_reverse_the_others_can():
    h, r, t = every_fact()
    ours = scorer("distmult")
    torch.testing.assert_close(ours.score(h, r, t), ours.score(t, r, h))
    for name in ("complex", "qmult"):
        ours = scorer(name)
        apart = h != t
        assert ((ours.score(h, r, t) - ours.score(t, r, h))[apart].abs() > 1e-6).all()


@pytest.mark.parametrize("name", ["complex", "qmult"])
def test_a_relation_may_be_symmetric_antisymmetric_or_the_inverse_of_another(name):
    """Real relations are symmetric, those without a real part antisymmetric, conjugates inverses."""
    ours, parts = scorer(name), SCORERS[name].parts
    real = D // parts
    ours.relations[0, real:] = 0
    ours.relations[1, :real] = 0
    ours.relations[3] = ours.relations[2]
    ours.relations[3, real:] *= -1
    h, t = torch.arange(E).repeat_interleave(E), torch.arange(E).repeat(E)

    def score(a, relation, b):
        return ours.score(a, torch.full_like(a, relation), b)

    torch.testing.assert_close(score(h, 0, t), score(t, 0, h))
    torch.testing.assert_close(score(h, 1, t), -score(t, 1, h))
    torch.testing.assert_close(score(h, 2, t), score(t, 3, h))
    assert (score(h, 2, t) - score(t, 2, h)).abs().max() > 0.1


def test_quaternions_multiply_by_their_table():
    one, i, j, k = torch.eye(4)
    for a, b, product in [
        (i, i, -one), (j, j, -one), (k, k, -one), (i, j, k), (j, k, i), (k, i, j), (j, i, -k), (k, j, -i), (i, k, -j),
    ]:  # fmt: skip
        assert torch.equal(hamilton_product(a, b), product)
        assert torch.equal(hamilton_product(one, a), a)
        assert torch.equal(hamilton_product(a, one), a)


@pytest.mark.parametrize(("product", "parts"), [(real_product, 1), (complex_product, 2), (hamilton_product, 4)])
def test_products_multiply_moduli_and_associate(product, parts):
    a, b, c = torch.randn(3, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def moduli(v):
        return v.unflatten(-1, (parts, -1)).norm(dim=-2)

    torch.testing.assert_close(moduli(product(a, b)), moduli(a) * moduli(b))
    torch.testing.assert_close(product(product(a, b), c), product(a, product(b, c)))
    commutes = torch.allclose(product(a, b), product(b, a))
    assert commutes == (parts < 4)


@pytest.mark.parametrize("name", ["complex", "qmult"])
def test_unit_relations_are_rotations(name):
    ours = scorer(name, normalize="unit")
    torch.testing.assert_close(
        ours.moduli(ours.relation(torch.arange(R))), torch.ones(R, D // ours.algebra.parts).double()
    )
    h, r = every_query()
    torch.testing.assert_close(ours.moduli(ours.query(h, r)), ours.moduli(ours.entities[h]))
    plain = scorer(name)
    assert not torch.allclose(plain.moduli(plain.query(h, r)), plain.moduli(plain.entities[h]))


def test_batch_norm_brings_products_to_mean_0_and_variance_1():
    ours = scorer("complex", normalize="batch")
    product = ours.train().query(*every_query())
    torch.testing.assert_close(product.mean(0), torch.zeros(D).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(product.var(0, correction=0), torch.ones(D).double(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"input_dropout": 0.5}])
def test_dropout_leaves_out_its_share_in_training_only(options):
    ours, plain = scorer("distmult", **options), scorer("distmult")
    queries = torch.zeros(2000, dtype=torch.long), torch.zeros(2000, dtype=torch.long)
    torch.testing.assert_close(ours.eval()(*queries), plain(*queries))
    dropped = (ours.train().query(*queries) == 0).double().mean()
    expected = 0.5 if "dropout" in options else 0.75  # either factor
    assert float(dropped) == pytest.approx(expected, abs=0.02)
    torch.testing.assert_close(ours.query(*queries).mean(0), plain.query(*queries)[0], rtol=0.3, atol=0.05)


@pytest.mark.parametrize("name", SCORERS)
def test_the_penalty_is_that_of_the_facts_one_by_one(name):
    ours, parts = scorer(name), SCORERS[name].parts
    facts = torch.tensor([[0, 1, 2], [0, 1, 3], [4, 5, 0], [2, 1, 2]])

    def cubes(vector):
        return sum(sum(x * x for x in number) ** 1.5 for number in numbers(vector, parts))

    expected = sum(
        cubes(ours.entities[h]) + cubes(ours.relations[r]) + cubes(ours.entities[t]) for h, r, t in facts.tolist()
    )
    entities, times = facts[:, [0, 2]].unique(return_counts=True)
    relations, relation_times = facts[:, 1].unique(return_counts=True)
    arguments = entities, times.double(), relations, relation_times.double()
    assert float(ours.penalty(*arguments)) == pytest.approx(expected, rel=1e-9)
    if parts > 1:
        unit = scorer(name, normalize="unit")
        entities_alone = sum(cubes(unit.entities[h]) + cubes(unit.entities[t]) for h, _, t in facts.tolist())
        assert float(unit.penalty(*arguments)) == pytest.approx(entities_alone, rel=1e-9)


def test_the_penalty_is_the_cube_of_the_modulus_whatever_the_phase():
    ours = scorer("complex")
    one = torch.ones(1).double()
    before = float(ours.penalty(torch.tensor([0]), one, torch.tensor([0]), one))
    turned = complex_product(ours.entities[0], torch.tensor([0.6, 0.8]).repeat_interleave(D // 2).double())
    assert not torch.allclose(turned, ours.entities[0])
    ours.entities[0] = turned
    assert float(ours.penalty(torch.tensor([0]), one, torch.tensor([0]), one)) == pytest.approx(before)


def test_parameters_are_drawn_with_the_deviation_that_was_asked_for():
    torch.manual_seed(0)
    ours = Multiplicative(SCORERS["distmult"], 2000, 10, 20, scale=0.01)
    assert float(ours.entities.detach().std()) == pytest.approx(0.01, rel=0.05)
    assert {name for name, _ in ours.named_parameters()} == {"entities", "relations"}


@pytest.mark.parametrize(
    ("name", "dim", "options", "message"),
    [
        ("complex", 7, {}, "2 for each of the complex numbers: it must be divisible by 2, got 7"),
        ("qmult", 6, {}, "divisible by 4, got 6"),
        ("distmult", 0, {}, "got 0"),
        ("complex", 8, {"normalize": "units"}, "normalize must be one of none, unit, batch, got 'units'"),
        ("distmult", 8, {"normalize": "unit"}, "take complex or qmult"),
    ],
)
def test_impossible_scorers_are_refused(name, dim, options, message):
    with pytest.raises(InputError, match=message):
        Multiplicative(SCORERS[name], E, R, dim, **options)
