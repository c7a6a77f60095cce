"""The values that the paper prints, as it prints them: digits, deviations, bold type.

A row of a table is a text: cells in the order of the columns, ``*`` before a bold one, ``±`` before a deviation.
Numbers stay text, so that what is shown are the paper's own digits. ``tools/compare_paper.py`` compares every cell with
the paper's LaTeX source.
"""

from __future__ import annotations

from typing import NamedTuple


class Printed(NamedTuple):
    """A cell: a value, its deviation over seeds (in the table's own unit) where there is one, and its type."""

    value: str
    deviation: str | None
    bold: bool

    @property
    def number(self) -> float:
        """Return the value as a number."""
        return float(self.value.replace(",", ""))


def cells(row: str) -> tuple[Printed, ...]:
    """Read a row.

    >>> cells("86.44±2.70 *0.351")
    (Printed(value='86.44', deviation='2.70', bold=False), Printed(value='0.351', deviation=None, bold=True))
    """
    found = []
    for cell in row.split():
        value, _, deviation = cell.removeprefix("*").partition("±")
        found.append(Printed(value, deviation or None, cell.startswith("*")))
    return tuple(found)


# CIFAR-10 with 40, 250, 4000 labels, CIFAR-100 with 400, 2500, 10000; SVHN with 40, 250, 1000, STL-10 with 1000.
ACCURACY = {
    "UDA": "86.44±2.70 *94.81±0.22 95.31±0.10 49.41±2.96 68.33±0.31 75.98±0.45 "
    "84.82±10.6 96.41±1.04 97.14±0.24 83.94±1.49",
    "FixMatch": "87.14±2.61 93.81±1.02 95.08±0.18 47.73±1.88 66.82±0.26 76.66±0.18 "
    "86.26±14.2 96.23±1.50 *97.32±0.09 85.34±0.92",
    "FixMatch DA": "89.54±5.90 94.00±0.56 95.13±0.21 51.31±2.67 69.98±0.30 76.67±0.08 "
    "86.00±16.3 95.85±1.62 97.02±0.16 85.59±1.21",
    "FlexMatch": "91.21±3.46 94.08±0.64 94.62±0.27 49.99±0.39 *71.47±1.06 77.01±0.17 "
    "85.78±1.37 96.52±0.29 96.54±0.30 85.24±1.49",
    "CSSL": "*91.70±4.77 94.59±0.15 95.41±0.04 52.54±1.60 67.81±0.64 77.56±0.22 "
    "*87.27±5.69 95.54±1.63 96.69±0.75 85.07±1.11",
    "CCSSL-diff": "90.13±3.33 93.56±0.21 95.43±0.06 *54.13±1.97 69.33±0.78 77.40±0.18 "
    "86.52±6.84 95.67±1.51 96.97±0.23 85.26±0.79",
    "CCSSL-prop": "89.24±2.56 94.34±0.27 *95.48±0.06 53.48±2.75 67.90±0.37 *77.72±0.08 "
    "85.38±7.67 *96.87±0.20 97.04±0.38 *85.67±1.14",
}

# Deviations are multiples of 1e-2. Columns as above.
ECE = {
    "UDA": "0.159±7.9 *0.051±0.2 0.046±0.1 0.420±2.6 0.232±0.5 0.173±0.5 0.124±1.1 0.037±1.3 0.030±0.1 0.140±0.9",
    "FixMatch": "0.136±4.3 0.059±1.0 0.048±0.1 0.417±2.3 0.254±0.5 0.168±0.1 "
    "0.275±34.9 0.038±1.3 *0.027±0.1 0.128±0.8",
    "FixMatch DA": "0.131±11.1 0.057±0.6 0.047±0.1 *0.347±2.4 0.234±0.4 0.169±0.1 "
    "*0.101±3.1 0.041±1.5 0.029±0.1 0.127±0.8",
    "FlexMatch": "0.114±3.7 0.057±0.5 0.052±0.2 0.404±0.3 0.232±0.5 0.169±0.2 "
    "0.126±1.3 0.039±0.3 0.033±0.4 0.130±0.9",
    "CSSL": "*0.079±4.4 0.053±0.1 0.045±0.0 0.368±0.8 0.233±0.6 0.167±0.2 0.121±5.1 0.041±1.1 0.032±0.1 0.126±0.9",
    "CCSSL-diff": "0.139±3.2 0.058±0.1 0.045±0.1 0.352±1.6 *0.222±0.3 0.165±0.1 "
    "0.117±7.2 0.044±1.2 0.030±0.3 0.129±0.6",
    "CCSSL-prop": "0.101±2.2 0.054±0.2 *0.044±0.1 *0.347±2.3 0.227±0.2 *0.162±0.2 "
    "0.128±8.6 *0.033±0.1 0.028±0.2 *0.124±0.8",
}

# Deviations are multiples of 1e-3. CIFAR-10 with 250, 1000 labels; SVHN with 250, 1000; each at 0.05, 0.1, 0.25.
VALIDITY = {
    "CSSL": "0.027±0.6 0.033±1.1 *0.042±0.7 0.033±1.1 0.037±4.8 0.042±1.1 "
    "0.038±0.6 0.044±1.4 0.053±0.8 0.030±1.6 0.034±6.1 0.040±2.1",
    "CCSSL-diff": "0.026±2.9 0.032±1.9 0.047±4.7 0.029±1.5 0.034±1.5 0.042±0.6 "
    "0.028±1.0 0.035±1.1 0.042±1.3 0.024±1.2 0.028±1.6 0.032±1.2",
    "CCSSL-prop": "*0.022±2.1 *0.031±1.5 0.043±1.7 *0.024±2.7 *0.029±3.4 *0.039±1.9 "
    "*0.014±1.1 *0.020±1.1 *0.024±0.3 *0.021±1.1 *0.023±2.7 *0.029±1.5",
}

# EMNIST-ByClass with 250, 500 labels.
IMBALANCE = {
    "CSSL": "49.96±4.08 62.74±2.15",
    "CCSSL-diff": "*59.22±3.93 67.39±3.74",
    "CCSSL-prop": "57.90±5.85 *67.62±4.61",
}

# CIFAR-10 with normalisation 1, 2; SVHN with 1, 2.
NORMALIZATION = {
    "CCSSL-diff": "92.38±1.14 92.71±0.81 95.93±1.78 95.70±1.81",
    "CCSSL-prop": "92.26±2.30 91.84±1.13 96.61±1.08 95.72±1.50",
}

# CIFAR-10, SVHN.
GAMMA = {
    "0.01": "*93.64±0.33 95.60±2.17",
    "0.1": "93.24±1.16 95.91±1.76",
    "0.5": "93.19±1.02 *96.82±0.10",
    "1": "93.01±1.23 96.61±0.08",
    "10": "92.29±1.94 95.41±2.07",
}

# Entities, relations, triples to train, validate and test with.
GRAPH_DATA = {
    "UMLS": "136 93 10,432 1,304 1,965",
    "KINSHIP": "105 51 17,088 2,136 3,210",
}

# MRR, H@1, H@3 on UMLS; the same on KINSHIP.
LINKS_40_40_20 = {
    "DistMult-PL": "0.229 0.128 0.243 0.262 0.160 0.284",
    "DistMult-CCSSL": "*0.246 *0.161 *0.265 *0.274 *0.170 *0.299",
    "ComplEx-PL": "*0.282 0.160 *0.358 0.333 0.226 0.382",
    "ComplEx-CCSSL": "0.253 *0.191 0.261 *0.344 *0.255 *0.381",
    "QMult-PL": "0.269 0.157 *0.309 0.323 0.228 0.351",
    "QMult-CCSSL": "*0.294 *0.217 *0.309 *0.328 *0.238 *0.363",
}
LINKS_40_10_50 = {
    "DistMult-PL": "0.229 0.128 0.243 0.262 0.160 0.284",
    "DistMult-CCSSL": "*0.246 *0.161 *0.265 *0.275 *0.170 *0.299",
    "ComplEx-PL": "*0.282 0.160 *0.358 0.333 0.226 0.382",
    "ComplEx-CCSSL": "0.253 *0.191 0.261 *0.335 *0.232 *0.378",
    "QMult-PL": "0.269 0.157 *0.309 0.323 0.228 .351",
    "QMult-CCSSL": "*0.294 *0.217 *0.309 *0.328 *0.238 *0.363",
}
LINKS_30_20_50 = {
    "DistMult-PL": "*0.263 *0.164 *0.268 *0.302 *0.198 *0.328",
    "DistMult-CCSSL": "0.240 0.161 0.253 0.245 0.140 0.267",
    "ComplEx-PL": "*0.308 *0.205 *0.351 *0.392 *0.302 *0.431",
    "ComplEx-CCSSL": "0.228 0.159 0.241 0.255 0.148 0.285",
    "QMult-PL": "*0.330 *0.223 *0.362 *0.381 *0.292 *0.422",
    "QMult-CCSSL": "0.224 0.150 0.225 0.221 0.118 0.242",
}
