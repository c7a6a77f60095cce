"""Train a network of your own with credal pseudo-labels; the ten lines that do it stand between two marks.

The problem: five overlapping clouds in 30 dimensions, 100 labels and 2,000 points without one. The network is an
ordinary ``nn.Sequential`` and the loop an ordinary loop; nothing in it knows ccssl.

The comparison is fair to learning from labels alone. Both runs start from the same weights and take the same
steps with the same optimiser and the same noise on their inputs. The credal run gives up half of its labels to
calibration; supervised-only trains on all 100. Single runs differ by luck: five are shown, and their mean.

What it does not show: that pseudo-labels always help. With 60 labels instead of 100, and 30 of them kept aside,
four runs of twenty end below supervised-only: those in which the other 30 hold one or two labels of some cloud. The
network then misses most of that cloud and teaches itself to go on missing it. Nor are credal pseudo-labels compared
with other kinds here.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ccssl import Calibration, credal_loss

CLASSES, DIMENSIONS, LABELS, KEPT_ASIDE, STEPS = 5, 30, 100, 50, 300


def main() -> None:
    torch.set_num_threads(1)  # faster for so small a network
    print(f"accuracy on 2,000 fresh points, {LABELS} labels\n\nseed   supervised   credal")
    results = []
    for seed in range(5):
        results.append((supervised(seed), credal(seed)))
        print("{:4}   {:10.3f}   {:6.3f}".format(seed, *results[-1]))
    print("mean   {:10.3f}   {:6.3f}".format(*torch.tensor(results).mean(0)))


def credal(seed: int) -> float:
    """Train on 50 labels and on the pseudo-labels that 50 others calibrate; return the accuracy."""
    x, y, unlabeled, fresh, truth = clouds(seed)
    held_x, held_y, x, y = x[:KEPT_ASIDE], y[:KEPT_ASIDE], x[KEPT_ASIDE:], y[KEPT_ASIDE:]
    net, optimizer = network(seed)
    # ---- the ten lines ----
    calibration = Calibration(score="proportion")
    for step in range(STEPS):
        with torch.no_grad():  # what the network believes, and how far such beliefs have been right
            if step % 10 == 0:
                calibration.fit(net(held_x).softmax(-1), held_y)
            batch = unlabeled[torch.randint(len(unlabeled), (128,))]
            pi = calibration.levels(net(batch).softmax(-1))
        loss = cross_entropy(net(blur(x)), y) + credal_loss(net(blur(batch)), pi)
        descend(optimizer, loss)
    # ---- end ----
    return accuracy(net, fresh, truth)


def supervised(seed: int) -> float:
    """Train on all 100 labels and nothing else; return the accuracy."""
    x, y, _, fresh, truth = clouds(seed)
    net, optimizer = network(seed)
    for _ in range(STEPS):
        descend(optimizer, cross_entropy(net(blur(x)), y))
    return accuracy(net, fresh, truth)


def blur(x: Tensor) -> Tensor:
    """Augment: inputs move a little, labels stay."""
    return x + 0.5 * torch.randn_like(x)


def network(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(DIMENSIONS, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    return net, torch.optim.Adam(net.parameters(), 3e-3)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def clouds(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return labeled points and their labels, unlabeled points, fresh points and their labels."""
    generator = torch.Generator().manual_seed(seed)
    centres = 0.6 * torch.randn(CLASSES, DIMENSIONS, generator=generator)

    def draw(number: int) -> tuple[Tensor, Tensor]:
        label = torch.randint(CLASSES, (number,), generator=generator)
        return centres[label] + torch.randn(number, DIMENSIONS, generator=generator), label

    return *draw(LABELS), draw(2000)[0], *draw(2000)


def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((net(x).argmax(-1) == y).double().mean())


if __name__ == "__main__":
    main()
