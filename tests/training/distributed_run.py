"""One of the processes of tests/training/test_distributed.py: train and note losses, weights and calibration."""

import json
import sys
from pathlib import Path

import torch
from toy import Flat, Normed, make, toy_config, toy_data

from ccssl import collective
from ccssl.experiments.run import prepare, split_of
from ccssl.training import processes

STEPS = 50


def main(method: str, network: str, out: str) -> None:
    torch.set_num_threads(1)
    config = toy_config(
        method=method, precision="fp64", steps=STEPS, teacher="snapshot" if "ccssl" in method else None
    )
    with processes.joined("cpu"):
        data = toy_data()
        training = prepare(config, data, split_of(config, data), make({"flat": Flat, "normed": Normed}[network]))
        losses = []
        for _ in training.run(STEPS):
            losses.append(training.losses()["loss"])
        scores = getattr(training.method, "calibration", None)
        noted = {
            "losses": losses,
            "weights": [p.flatten().tolist() for p in training.network.parameters()],
            "tensors": {k: v.flatten().tolist() for k, v in training.tensors().items() if k != "sums"},
            "state": {k: v.flatten().double().tolist() for k, v in training.method.state_dict().items()},
            "scores": scores.scores.tolist() if scores is not None else [],
            "figures": training.evaluate(),
            "world": collective.world(),
        }
        Path(f"{out}-{collective.rank()}.json").write_text(json.dumps(noted))


if __name__ == "__main__":
    main(*sys.argv[1:])
