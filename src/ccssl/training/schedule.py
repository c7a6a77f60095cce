"""The learning rate as a function of the step."""

import math


def cosine(step: int, steps: int) -> float:
    r"""Return the factor cos(7 pi t / 16 T) of FixMatch: from 1 down to cos(7 pi / 16) = 0.195, never to 0.

    >>> cosine(0, 100), round(cosine(100, 100), 3)
    (1.0, 0.195)
    """
    return math.cos(7 * math.pi * step / (16 * steps))
