"""One of the processes of tests/training/test_distributed.py: train and note losses, weights and calibration.

Afterwards: what the loss is said to be after a resumption between two evaluations, and what is said of a fault that
this process did not see.
"""

import json
import sys
from pathlib import Path

import torch
from toy import Flat, Normed, make, toy_config, toy_data

from ccssl import collective
from ccssl.experiments.run import prepare, split_of
from ccssl.training import checkpoint, processes
from ccssl.training.loop import NonFiniteLoss

STEPS = 50


def resumed(training, other, folder: Path) -> dict[str, float]:
    """Train two steps more, and two from a checkpoint of the first of them; return the losses of both."""
    for _ in training.run(STEPS + 1):
        pass
    tensors, state = training.tensors(), training.state()
    if collective.rank() == 0:
        checkpoint.save(folder, STEPS + 1, tensors, state)
    processes.wait()
    other.load(*checkpoint.load(folder))
    for one in (training, other):
        for _ in one.run(STEPS + 2):
            pass
    return {"whole": training.losses()["loss"], "resumed": other.losses()["loss"]}


def fault(training) -> str:
    """Return what a check says."""
    try:
        training.check()
    except NonFiniteLoss as error:
        return str(error)
    return ""


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
        if network == "flat" and method == "ccssl-prop":
            noted |= resumed(training, prepare(config, data, training.split, make(Flat)), Path(f"{out}-kept"))
        training.first_bad_step.fill_([7, 5][collective.rank()] if collective.world() > 1 else 5)
        noted["fault"] = fault(training)
        training.first_bad_step.fill_(-1)
        if collective.rank() == collective.world() - 1:
            next(training.network.parameters()).data[0] = torch.nan
        noted["spoiled"] = fault(training)
        Path(f"{out}-{collective.rank()}.json").write_text(json.dumps(noted))


if __name__ == "__main__":
    main(*sys.argv[1:])
