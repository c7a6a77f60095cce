"""Extreme points against brute force, linear programs and event bounds; the picture's geometry and text."""

import itertools
import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from ccssl.credal import polytope
from ccssl.credal.polytope import draw, extreme_points
from ccssl.credal.possibility import Levels, contains, upper_probability

# Few distinct degrees make ties and zeros common.
degrees = st.one_of(
    st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
    st.floats(0.001, 0.999),
)


@st.composite
def possibilities(draw, min_classes=2, max_classes=7):
    values = draw(st.lists(degrees, min_size=min_classes, max_size=max_classes))
    values[draw(st.integers(0, len(values) - 1))] = 1.0
    return torch.tensor(values, dtype=torch.float64)


def rows(points):
    """The points as a sorted array: two sets of points are equal where these are close."""
    return np.array(sorted(np.round(points, 9).tolist()))


def constraints(pi):
    """A @ p <= b, written from the definition: a bound for each event."""
    events = [list(event) for event in itertools.product([0.0, 1.0], repeat=len(pi)) if any(event)]
    return np.array(events), np.array([max(d for d, inside in zip(pi, e, strict=True) if inside) for e in events])


@settings(max_examples=150, deadline=None)
@given(possibilities())
def test_extreme_points_are_feasible_distinct_and_counted(pi):
    vertices = extreme_points(pi)
    assert bool(contains(vertices, pi).all())
    levels = [d for d in sorted(set(pi.tolist())) if d > 0]
    count = {d: pi.tolist().count(d) for d in levels}
    assert len(vertices) == count[1.0] * math.prod(1 + count[d] for d in levels[:-1])
    assert len(vertices) <= 2 ** (len(pi) - 1)
    assert len({tuple((row > 0).tolist()) for row in vertices}) == len(vertices)


@settings(max_examples=60, deadline=None)
@given(possibilities(max_classes=4))
def test_extreme_points_equal_brute_force(pi):
    # A vertex is a feasible point at which K independent constraints are tight, sum p = 1 among them.
    K = len(pi)
    a, b = constraints(pi.tolist())
    a, b = np.vstack([a, -np.eye(K)]), np.concatenate([b, np.zeros(K)])
    found = []
    for tight in itertools.combinations(range(len(a)), K - 1):
        system = np.vstack([np.ones(K), a[list(tight)]])
        if abs(np.linalg.det(system)) < 1e-9:
            continue
        p = np.linalg.solve(system, np.concatenate([[1.0], b[list(tight)]]))
        if (a @ p <= b + 1e-10).all():
            found.append(p + 0.0)
    unique = rows(found)
    unique = unique[np.concatenate([[True], (np.abs(np.diff(unique, axis=0)) > 1e-7).any(1)])]
    np.testing.assert_allclose(rows(extreme_points(pi).numpy()), unique, atol=1e-8)


@settings(max_examples=40, deadline=None)
@given(possibilities(max_classes=6), st.integers(0, 2**31 - 1))
def test_support_function_equals_linear_programming(pi, seed):
    w = np.random.default_rng(seed).normal(size=len(pi))
    a, b = constraints(pi.tolist())
    optimum = linprog(-w, A_ub=a, b_ub=b, A_eq=np.ones((1, len(pi))), b_eq=[1.0], bounds=(0, None))
    assert (extreme_points(pi).numpy() @ w).max() == pytest.approx(-optimum.fun, abs=1e-8)


@settings(max_examples=60, deadline=None)
@given(possibilities(max_classes=6))
def test_upper_probability_is_attained_at_an_extreme_point(pi):
    vertices = extreme_points(pi)
    for event in itertools.product([False, True], repeat=len(pi)):
        mask = torch.tensor(event)
        attained = vertices[:, mask].sum(-1).max() if any(event) else torch.tensor(0.0)
        assert float(attained) == pytest.approx(float(upper_probability(pi, mask)), abs=1e-12)


def test_extreme_points_of_the_simple_cases():
    torch.testing.assert_close(extreme_points(torch.tensor([0.0, 1.0, 0.0])), torch.tensor([[0.0, 1.0, 0.0]]))
    torch.testing.assert_close(extreme_points(torch.ones(4)), torch.eye(4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_extreme_points_keep_the_type(dtype):
    vertices = extreme_points(torch.tensor([0.25, 1.0, 0.5], dtype=dtype))
    assert vertices.dtype == dtype
    assert vertices.sum(-1).tolist() == [1.0] * 4


def test_levels_stand_for_their_degrees():
    levels = Levels(torch.tensor([[0, 3, 1]]), size=4)[0]
    torch.testing.assert_close(extreme_points(levels), extreme_points(levels.dense()))


@pytest.mark.parametrize(
    ("pi", "message"),
    [
        (torch.cat([torch.linspace(0.01, 0.9, 24), torch.ones(1)]), "16,777,216 extreme points"),
        (torch.linspace(0.001, 1, 5000, dtype=torch.float64), r"about 10\^1505 extreme points"),
        (torch.ones(5000), "5,000 extreme points of 5,000 probabilities"),
        (torch.ones(2, 3), r"shape \(K,\), got shape \(2, 3\)"),
        (torch.tensor([1, 0]), "floating point, got torch.int64"),
        (torch.tensor([1.0]), "at least 2 classes"),
        (torch.tensor([0.5, 0.75]), "maximum exactly 1, got 0.75"),
        (torch.tensor([1.0, float("nan")]), r"in \[0, 1\]"),
        (torch.tensor([1.0, -0.5]), r"in \[0, 1\]"),
        (torch.tensor([2.0, 1.0]), r"in \[0, 1\]"),
    ],
)
def test_extreme_points_refuse(pi, message):
    with pytest.raises(ValueError, match=message):
        extreme_points(pi)


PICTURES = {
    "triangle": [0.25, 1.0, 0.5],
    "vacuous": [1.0, 1.0, 1.0],
    "segment": [0.0, 1.0, 0.4],
    "point": [0.0, 1.0, 0.0],
    "tiny": [1e-6, 1.0, 1e-6],
    "polytope": [0.3, 1.0, 0.6, 0.8],
    "ties": [0.5, 0.5, 0.5, 1.0],
    "tetrahedron": [1.0, 1.0, 1.0, 1.0],
    "flat": [1.0, 0.0, 0.4, 0.7],
    "nearly flat": [1.0, 1e-7, 0.4, 0.7],
    "segment of four": [1.0, 0.0, 0.4, 0.0],
    "point of four": [0.0, 0.0, 0.0, 1.0],
}


def texts(svg):
    return [element.text or "" for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("degrees", PICTURES.values(), ids=PICTURES)
def test_draw_names_every_corner_and_extreme_point(degrees):
    pi = torch.tensor(degrees)
    prediction = torch.full((len(pi),), 1 / len(pi))
    words = texts(draw(pi, prediction))
    for name in [f"class {k}" for k in range(len(pi))]:
        assert name in words
    assert len([word for word in words if word.startswith("π = ")]) == len(pi)
    # the prediction's probabilities and at least one extreme point's
    assert len([word for word in words if word.startswith("(")]) >= 2


def test_draw_tells_the_projection_and_computes_it_where_it_is_not_given():
    pi, prediction = torch.tensor([0.4, 1.0, 0.2]), torch.tensor([0.7, 0.2, 0.1])
    words = texts(draw(pi, prediction))
    assert words == texts(draw(pi, prediction, torch.tensor([0.35, 0.6, 0.05])))
    assert {"prediction", "(.70, .20, .10)", "projection", "(.35, .60, .05)"} <= set(words)
    assert "(0, 1, 0)" in words
    assert "(.20, .80, 0)" not in words
    assert "(.40, .60, 0)" in words


def test_draw_says_when_the_prediction_is_inside():
    prediction = torch.tensor([0.2, 0.7, 0.1])
    assert "prediction, already inside" in texts(draw(torch.tensor([0.4, 1.0, 0.2]), prediction, prediction))


def test_draw_is_deterministic_self_contained_and_keeps_global_settings():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    pi = torch.tensor([0.3, 1.0, 0.6, 0.8])
    svg = draw(pi)
    assert svg == draw(pi)
    assert dict(mpl.rcParams) == before
    assert svg.startswith("<svg role=")
    for outside in ("<image", "<script", 'href="http', "url(http", "@import", "<dc:date"):
        assert outside not in svg


def test_draw_is_safe_with_any_name():
    names = ["<b>&\"'", "$x^2$", "野鸟\n\x07", "n" * 100]
    words = texts(draw(torch.tensor([0.3, 1.0, 0.6, 0.8]), labels=names))
    assert {"<b>&\"'", "$x^2$", "野鸟  ", "n" * 19 + "…"} <= set(words)


def test_number_never_rounds_to_certainty():
    numbers = [0.0, 1e-9, 0.0049, 0.005, 0.25, 0.994, 0.9999, 1.0]
    assert [polytope._number(x) for x in numbers] == ["0", "≈0", "≈0", ".01", ".25", ".99", "≈1", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pi": torch.ones(2)}, "three or four classes to be drawn, got 2"),
        ({"pi": torch.ones(5)}, "three or four classes to be drawn, got 5"),
        ({"pi": torch.ones(3), "labels": ["a", "b"]}, "labels must name 3 classes, got 2"),
        ({"pi": torch.ones(3), "projection": torch.ones(3) / 3}, "projection needs the prediction"),
        (
            {"pi": torch.ones(3), "prediction": torch.ones(4) / 4},
            r"prediction must have shape \(3,\), got \(4,\)",
        ),
        ({"pi": torch.ones(3), "prediction": torch.ones(3)}, "prediction must be a probability distribution"),
        (
            {
                "pi": torch.tensor([0.1, 1.0, 0.1]),
                "prediction": torch.ones(3) / 3,
                "projection": torch.ones(3) / 3,
            },
            "projection must lie in the credal set of pi",
        ),
    ],
)
def test_draw_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw(**arguments)


@pytest.mark.parametrize("classes", [3, 4])
def test_corners_are_equally_far_from_each_other(classes):
    corners = polytope._corners(classes)
    distances = [np.linalg.norm(a - b) for a, b in itertools.combinations(corners, 2)]
    np.testing.assert_allclose(distances, polytope._SIDE[classes])


@settings(max_examples=50, deadline=None)
@given(possibilities(min_classes=4, max_classes=4))
def test_body_obeys_euler_and_hides_only_what_lies_inside_the_outline(pi):
    assume(float(pi[pi > 0].min()) > 0.02)  # a body thinner than the eye can see is drawn as flat
    points = extreme_points(pi).numpy() @ polytope._corners(4)
    body = polytope._body(points)
    dimension = int((pi > 0).sum()) - 1
    if dimension < 3:
        assert len(body.faces) == (dimension == 2)
        assert body.hidden == []
        return
    assert len(points) - len(body.seen) - len(body.hidden) + len(body.faces) == 2
    assert sum(on_outline(points[:, :2], *edge[:, :2]) for edge in body.seen) >= 3
    assert not any(on_outline(points[:, :2], *edge[:, :2]) for edge in body.hidden)


def on_outline(points, a, b):
    """Whether all points lie on one side of the line through a and b."""
    side = np.cross(np.append(b - a, 0), np.c_[points - a, np.zeros(len(points))])[:, 2]
    return (side <= 1e-6).all() or (side >= -1e-6).all()


def test_labels_do_not_overlap_nor_leave_the_canvas():
    # The worst typical case: a confident prediction, whose extreme points crowd in one corner.
    generator = np.random.default_rng(0)
    canvas = (420, 326)
    for _ in range(20):
        at = np.array([60.0, 60.0]) + generator.uniform(0, 30, (8, 2))
        labels = [polytope._Label(point, ("(.90, .10, 0)",), "black", 10, 6) for point in at]
        sizes = [np.array([72.0, 15.0])] * 8
        centres = polytope._place(labels, sizes, at, np.array([[200.0, 150.0]]), canvas)
        for one, other in itertools.combinations(centres, 2):
            assert (np.abs(one - other) >= (72, 15)).any()
        for centre in centres:
            assert (np.abs(centre - np.array(canvas) / 2) <= np.array(canvas) / 2 - np.array([36, 7.5])).all()
