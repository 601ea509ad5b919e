"""Train four small networks on scikit-learn's digits and write ONNX files and properties with known answers.

    python examples/make_examples.py                  # everything, into examples/out
    python examples/make_examples.py --bundled        # the one that is committed, into examples/bundled

Every property asks whether some image near a test image gets another class. The answers do not come from parverify:
`sat` has a witness that onnxruntime confirms, `unsat` a proof by interval arithmetic (`intervals.py`). Beside the
networks and properties the folder gets `instances.csv` (onnx, vnnlib, timeout in seconds; no header, as VNN-COMP has
it), `expected.csv` (onnx, vnnlib, verdict, why) and a `.witness` file for every `sat`.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from intervals import MARGIN, bound_margins, cells
from networks import CLASSES, SIDE, all_networks, bundled_network
from onnx_builder import export
from torch import nn

HERE = Path(__file__).resolve().parent
TEST_IMAGES = 297
TIMEOUT = 60

Array = np.ndarray


@dataclass(frozen=True)
class Digits:
    """The data: images (n, 64) float32 in [0, 1], labels (n,) int64; the last `TEST_IMAGES` are for testing."""

    images: Array
    labels: Array


@dataclass(frozen=True)
class Property:
    """A property with its answer.

    Args:
        label: the class that every image of the box should get.
        lower, upper: (64,) float32, the box.
        why: how the answer is known.
        witness: (64,) float32, an image of the box with another class, or None where there is none.
    """

    label: int
    lower: Array
    upper: Array
    why: str
    witness: Array | None = None

    @property
    def verdict(self) -> str:
        return "unsat" if self.witness is None else "sat"


@dataclass
class Network:
    """A trained network in both forms."""

    name: str
    module: nn.Module
    model: onnx.ModelProto
    session: onnxruntime.InferenceSession = field(init=False)

    def __post_init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(self.model.SerializeToString(), options, ["CPUExecutionProvider"])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.module.input_shape

    def scores(self, image: Array) -> Array:
        """(64,) float32 -> (10,) float32, by onnxruntime."""
        return self.session.run(None, {"x": image.reshape(self.shape)})[0][0]


def load_digits() -> Digits:
    """scikit-learn's 1797 images, in a fixed random order."""
    from sklearn.datasets import load_digits as load

    data = load()
    order = np.random.default_rng(0).permutation(len(data.target))
    return Digits((data.data / 16).astype(np.float32)[order], data.target.astype(np.int64)[order])


def train(module: nn.Module, digits: Digits, epochs: int = 40) -> float:
    """Train with Adam and noisy images; returns the accuracy on the test images. The module ends in eval mode."""
    torch.manual_seed(1)
    images = torch.from_numpy(digits.images).reshape(-1, *module.input_shape[1:])
    labels = torch.from_numpy(digits.labels)
    seen = len(labels) - TEST_IMAGES
    optimizer = torch.optim.Adam(module.parameters(), lr=4e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    module.train()
    for _ in range(epochs):
        for batch in torch.randperm(seen).split(64):
            noisy = images[batch] + 0.1 * torch.randn_like(images[batch])
            loss = nn.functional.cross_entropy(module(noisy), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    module.eval()
    with torch.no_grad():
        return float((module(images[seen:]).argmax(1) == labels[seen:]).float().mean())


def make_network(name: str, module: nn.Module, digits: Digits) -> Network:
    """Train, export, and compare the export with the module."""
    accuracy = train(module, digits)
    network = Network(name, module, export(module))
    worst = 0.0
    for image in digits.images[-TEST_IMAGES:]:
        with torch.no_grad():
            expected = module(torch.from_numpy(image).reshape(network.shape))[0].numpy()
        worst = max(worst, float(np.abs(expected - network.scores(image)).max()))
    if worst > 1e-4:
        raise ValueError(f"{name}: the ONNX graph differs from the module by {worst}")
    print(f"{name}: accuracy {accuracy:.1%}, largest difference to onnxruntime {worst:.1e}")
    return network


def ball(image: Array, radius: float) -> tuple[Array, Array]:
    """The box of images within `radius` in every pixel, cut at [0, 1]; float32, so that every tool reads the same."""
    radius = np.float32(radius)
    return np.clip(image - radius, 0, 1), np.clip(image + radius, 0, 1)


def square(image: Array, radius: float = 1.0) -> tuple[Array, Array]:
    """The ball restricted to the 2 x 2 pixels in the middle; all others are fixed."""
    free = np.zeros((SIDE, SIDE), bool)
    free[SIDE // 2 - 1 : SIDE // 2 + 1, SIDE // 2 - 1 : SIDE // 2 + 1] = True
    lower, upper = ball(image, radius)
    return np.where(free.ravel(), lower, image), np.where(free.ravel(), upper, image)


def attack(network: Network, label: int, box: tuple[Array, Array]) -> Array | None:
    """Projected gradient descent from 8 random starts; an image of the box that onnxruntime misclassifies."""
    lower, upper = (torch.from_numpy(edge) for edge in box)
    generator = torch.Generator().manual_seed(0)
    x = lower + (upper - lower) * torch.rand(8, len(lower), generator=generator)
    for step in range(60):
        x = x.detach().requires_grad_()
        scores = network.module(x.reshape(-1, *network.shape[1:]))
        others = scores.masked_fill(torch.arange(CLASSES) == label, -torch.inf).amax(1)
        (gradient,) = torch.autograd.grad((others - scores[:, label]).sum(), x)
        x = x + (0.25 if step < 30 else 0.05) * (upper - lower) * gradient.sign()
        x = torch.minimum(torch.maximum(x, lower), upper)
    for image in x.detach().numpy():
        scores = network.scores(image)
        if np.delete(scores, label).max() > scores[label] + MARGIN:
            return image
    return None


def prove(network: Network, label: int, box: tuple[Array, Array], parts: int = 1) -> bool:
    """Whether interval arithmetic proves, cell by cell, that every image of the box gets `label`."""
    lower, upper = (edge.astype(np.float64).reshape(network.shape[1:]) for edge in box)
    lower, upper = cells(lower, upper, parts) if parts > 1 else (lower[None], upper[None])
    rows = np.eye(CLASSES)[label] - np.delete(np.eye(CLASSES), label, 0)
    return bool((bound_margins(network.model, lower, upper, rows) >= MARGIN).all())


def bisect(low: float, high: float, is_low: Callable[[float], bool]) -> tuple[float, float]:
    """Narrow an interval down to 5 %, keeping `is_low` true at its lower end and false at its upper end."""
    while high > 1.05 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_low(middle) else (low, middle)
    return low, high


def sat_ball(network: Network, image: Array, label: int) -> Property | None:
    """The smallest ball in which the attack finds something, and a tenth more."""
    if attack(network, label, ball(image, 0.5)) is None:
        return None
    _, radius = bisect(1e-3, 0.5, lambda r: attack(network, label, ball(image, r)) is None)
    box = ball(image, 1.1 * radius)
    witness = attack(network, label, box)
    why = f"gradient descent finds the witness in the ball of {1.1 * radius:.4f} and onnxruntime confirms it"
    return None if witness is None else Property(label, *box, why, witness)


def sat_square(network: Network, image: Array, label: int) -> Property | None:
    """Four free pixels with a misclassified image."""
    box = square(image)
    witness = attack(network, label, box)
    why = "gradient descent finds the witness with four free pixels and onnxruntime confirms it"
    return None if witness is None else Property(label, *box, why, witness)


def unsat_ball(network: Network, image: Array, label: int) -> Property | None:
    """The largest ball that interval arithmetic proves, up to 5 %."""
    if not prove(network, label, ball(image, 1e-5)):
        return None
    radius, _ = bisect(1e-5, 0.5, lambda r: prove(network, label, ball(image, r)))
    why = f"interval arithmetic in float64 proves the ball of {radius:.5f} with a margin of {MARGIN}"
    return Property(label, *ball(image, radius), why)


def unsat_square(network: Network, image: Array, label: int, parts: int = 6) -> Property | None:
    """Four free pixels, as far as one interval does not prove them but `parts` ** 4 cells do."""
    for radius in (1.0, 0.3, 0.1, 0.03, 0.01):
        box = square(image, radius)
        if prove(network, label, box):
            return None
        if prove(network, label, box, parts):
            cut = f"each of {parts**4} cells of four pixels free by {radius}"
            return Property(label, *box, f"interval arithmetic in float64 proves {cut} with a margin of {MARGIN}")
    return None


KINDS = {"ball_sat": sat_ball, "ball_unsat": unsat_ball, "square_sat": sat_square, "square_unsat": unsat_square}


def first_property(network: Network, digits: Digits, kind: str) -> Property:
    """The property of the first correctly classified test image that admits one of this kind."""
    for image, label in zip(digits.images[-TEST_IMAGES:], digits.labels[-TEST_IMAGES:], strict=True):
        if np.argmax(network.scores(image)) == label:
            made = KINDS[kind](network, image, int(label))
            if made is not None:
                return made
    raise ValueError(f"{network.name}: no test image gives a property of the kind {kind}")


def vnnlib(made: Property) -> str:
    """The property in VNN-LIB 1.0: an image of the box and, for the unsafe outputs, another class on top."""
    lines = [f"; true class {made.label}; {made.verdict}: {made.why}"]
    lines += [f"(declare-const X_{i} Real)" for i in range(SIDE * SIDE)]
    lines += [f"(declare-const Y_{i} Real)" for i in range(CLASSES)]
    for i, (low, high) in enumerate(zip(made.lower, made.upper, strict=True)):
        # The edges are float32 numbers and are read back as such, so no tool's rounding moves the box.
        lines += [f"(assert (>= X_{i} {decimal(low)}))", f"(assert (<= X_{i} {decimal(high)}))"]
    others = " ".join(f"(and (>= Y_{j} Y_{made.label}))" for j in range(CLASSES) if j != made.label)
    return "\n".join([*lines, f"(assert (or {others}))", ""])


def decimal(value: float) -> str:
    """The shortest decimal that reads back equal, without an exponent, which some readers of VNN-LIB do not know."""
    return np.format_float_positional(np.float64(value), unique=True, trim="0")


def witness_text(network: Network, image: Array) -> str:
    """The witness in the form of VNN-COMP: `sat`, then every input and output in one list of pairs."""
    pairs = [f"(X_{i} {decimal(v)})" for i, v in enumerate(image)]
    pairs += [f"(Y_{i} {decimal(v)})" for i, v in enumerate(network.scores(image))]
    return "sat\n(" + "\n".join(pairs) + ")\n"


def write(out: Path, networks: list[Network], digits: Digits, kinds: list[str]) -> None:
    """Write networks, properties, witnesses and the two tables."""
    out.mkdir(parents=True, exist_ok=True)
    instances, expected = [], [("onnx", "vnnlib", "verdict", "why")]
    for network in networks:
        onnx.save(network.model, out / f"{network.name}.onnx")
        for kind in kinds:
            made = first_property(network, digits, kind)
            stem = f"{network.name}_{kind}"
            (out / f"{stem}.vnnlib").write_text(vnnlib(made))
            if made.witness is not None:
                (out / f"{stem}.witness").write_text(witness_text(network, made.witness))
            instances.append((f"{network.name}.onnx", f"{stem}.vnnlib", TIMEOUT))
            expected.append((f"{network.name}.onnx", f"{stem}.vnnlib", made.verdict, made.why))
            print(f"  {stem}: {made.verdict}, {made.why}")
    for name, rows in (("instances.csv", instances), ("expected.csv", expected)):
        with (out / name).open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder to write (default: out or bundled beside this script)")
    parser.add_argument("--bundled", action="store_true", help="only the small example that is committed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    digits = load_digits()
    modules = {"digits": bundled_network()} if options.bundled else all_networks()
    networks = [make_network(name, module, digits) for name, module in modules.items()]
    out = options.out or HERE / ("bundled" if options.bundled else "out")
    kinds = ["ball_sat", "square_unsat"] if options.bundled else list(KINDS)
    write(out, networks, digits, kinds)
    print(f"wrote {out} in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
