"""The published setting of `surge`: a binary network of the literature on CIFAR-10, for a machine with a GPU.

    python -m acclimate.claims.surge_cifar --data cifar-10-batches-bin --model resnet20 --epochs 600 --device cuda -o resnet20.json

--data is the folder of the "binary version" of CIFAR-10 (data_batch_1.bin to data_batch_5.bin, test_batch.bin). SGD with momentum 0.9 at 0.1, cosine,
batches of 128, weight decay 1e-4 of what decays, crops of images padded by 4 and mirror images. Published test accuracy of SURGE: 88.0 % (resnet20),
93.1 % (resnet18), 92.5 % (vgg_small), each to be met within 0.3 points. The weights, and all that is needed to go on after an interruption, are
beside --output. Nobody has run this on a GPU for this repository yet.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acclimate import runs
from acclimate.compress.binary_networks import surge_resnet18, surge_resnet20, surge_vgg_small
from acclimate.compress.surge import SurgeConfig, clip_latent_, parameter_groups, set_progress
from acclimate.errors import InputError

NETWORKS: dict[str, Callable[[SurgeConfig], nn.Module]] = {
    "resnet20": lambda config: surge_resnet20(10, config),
    "resnet18": lambda config: surge_resnet18(10, config, small=True),
    "vgg_small": lambda config: surge_vgg_small(10, config),
}
PUBLISHED = {"resnet20": 0.880, "resnet18": 0.931, "vgg_small": 0.925}
LR, BATCH, DECAY = 0.1, 128, 1e-4
RECORD = 1 + 3 * 32 * 32  # the class, then red, green and blue


def read(paths: list[Path]) -> tuple[Tensor, Tensor]:
    """((n, 3, 32, 32) uint8, classes) of files of CIFAR-10's binary version."""
    parts = []
    for path in paths:
        if not path.is_file():
            raise InputError(f"there is no '{path}': --data is the folder of CIFAR-10's binary version")
        content = np.fromfile(path, np.uint8)
        if not len(content) or len(content) % RECORD:
            raise InputError(
                f"'{path}' is no file of CIFAR-10's binary version: {len(content)} bytes, not a multiple of {RECORD}"
            )
        parts.append(torch.from_numpy(content.reshape(-1, RECORD)))
    rows = torch.cat(parts)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image padded by 4 pixels and cut out somewhere, half of them mirrored."""
    n = len(images)
    top, left = torch.randint(9, (2, n), generator=generator)
    mirrored = torch.rand(n, generator=generator) < 0.5
    across = torch.arange(32).expand(n, 32)
    across = torch.where(mirrored[:, None], 31 - across, across) + left[:, None]
    down = torch.arange(32) + top[:, None]
    padded = F.pad(images, (4, 4, 4, 4))
    place = [part.to(images.device) for part in (torch.arange(n)[:, None, None], down[:, :, None], across[:, None, :])]
    return padded.permute(0, 2, 3, 1)[place[0], place[1], place[2]].permute(0, 3, 1, 2)


def run(options: argparse.Namespace, until: int | None = None) -> dict[str, Any]:
    """Train and test as the command line says; `until` stops after so many epochs, as an interruption would."""
    config = SurgeConfig(
        eta=options.eta, aux=None if options.aux == "none" else options.aux, estimator=options.estimator,
        rectify=(0.85, 0.99) if options.recu else None,
    )  # fmt: skip
    train = read([options.data / f"data_batch_{i}.bin" for i in range(1, 6)])
    test = read([options.data / "test_batch.bin"])
    scale = train[0].float().div_(255)
    mean, std = scale.mean((0, 2, 3)).view(3, 1, 1), scale.std((0, 2, 3)).view(3, 1, 1)
    images, held = (((x.float() / 255 - mean) / std).to(options.device) for x, _ in (train, test))
    classes = train[1].to(options.device)
    torch.manual_seed(options.seed)
    model = NETWORKS[options.model](config).to(options.device)
    optimizer = torch.optim.SGD(parameter_groups(model, DECAY), lr=LR, momentum=0.9)
    state, done = options.output.with_suffix(".pt"), 0
    if state.exists():
        saved = torch.load(state, map_location=options.device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["epochs"]
    starts = range(0, len(images), BATCH)
    for epoch in range(done, options.epochs if until is None else until):
        generator = torch.Generator().manual_seed(options.seed * 100_003 + epoch)
        order, losses = torch.randperm(len(images), generator=generator), []
        model.train()
        for start in starts:
            progress = (epoch + start / len(images)) / options.epochs
            set_progress(model, progress)
            for group in optimizer.param_groups:
                group["lr"] = LR * (1 + math.cos(math.pi * progress)) / 2
            chosen = order[start : start + BATCH].to(options.device)
            loss = F.cross_entropy(model(augmented(images[chosen], generator)), classes[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            clip_latent_(model)
            losses.append(loss.detach())
        print(f"epoch {epoch + 1}: training loss {float(torch.stack(losses).mean()):.4f}", flush=True)
        with runs.replacing(state) as temporary:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}, temporary
            )
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(part).argmax(1).cpu() for part in held.split(500)])
    result = {
        "model": options.model, "epochs": options.epochs, "seed": options.seed, "aux": options.aux, "eta": options.eta,
        "estimator": options.estimator, "recu": options.recu, "accuracy": float((found == test[1]).double().mean()), "published": PUBLISHED[options.model],
    }  # fmt: skip
    runs.write_json(options.output, result)
    return result


def command_line(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of CIFAR-10's binary version")
    parser.add_argument("--model", choices=NETWORKS, default="resnet20")
    parser.add_argument("--epochs", type=int, default=600)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--aux", choices=("copy", "shared", "none"), default="copy", help="none: the estimator alone")
    parser.add_argument("--eta", type=float, default=0.3)
    parser.add_argument("--estimator", choices=("ste", "bireal", "ede"), default="ste")
    parser.add_argument("--recu", action="store_true", help="rectified weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=Path("surge-cifar.json"), help="the accuracy")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    print(run(command_line()))
