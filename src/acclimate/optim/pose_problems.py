"""Pose from 2-D keypoints, as problems to minimise: find the joint rotations whose projection is what a camera saw.

Unknowns, d = 3 J + 3 for J joints: axis-angle vectors of all joints (the first is the body's orientation), and scale (less 1) and shift of a
weak-perspective camera. With joint positions X_j(theta) from forward kinematics and seen points y_j

    f = sum_j |s X_j(theta)_xy + t - y_j|^2 + 1e-3 |theta - mean|^2          lengths in metres

The motion is a real clip (`samples/mocap`); each problem is a frame seen from a random side, and starts at the mean pose, facing the camera.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

CLIP = Path(__file__).parents[1] / "samples" / "mocap" / "mocapbank.bvh.gz"
PRIOR = 1e-3
YAW, PITCH = math.radians(60), math.radians(15)  # how far the view may turn


@dataclass(frozen=True)
class Skeleton:
    """Joints in an order where parents come first; `offsets` (J, 3) in metres from the parent."""

    names: list[str]
    parents: list[int]
    offsets: Tensor


def read_bvh(text: str) -> tuple[Skeleton, Tensor]:
    """The skeleton and the rotations (frames, J, 3, 3) of a BVH file in centimetres; end sites are left out. The root's position is not read."""
    names, parents, offsets, channels = list[str](), list[int](), list[list[float]](), list[list[str]]()
    open_joints: list[int] = []
    header, motion = text.split("MOTION", 1)
    for line in header.splitlines():
        match line.split():
            case ["ROOT" | "JOINT", name]:
                names.append(name)
                parents.append(open_joints[-1] if open_joints else -1)
                pending = len(names) - 1
            case ["End", "Site"]:
                pending = -1
            case ["{"]:
                open_joints.append(pending)
            case ["}"]:
                open_joints.pop()
            case ["OFFSET", *values] if open_joints[-1] >= 0:
                offsets.append([float(value) / 100 for value in values])
            case ["CHANNELS", _, *found]:
                channels.append(found)
    rows = [[float(value) for value in line.split()] for line in motion.strip().splitlines()[2:]]
    table = torch.tensor(rows, dtype=torch.float64)
    rotations, column = [], 0
    for of_joint in channels:
        R = torch.eye(3, dtype=torch.float64).expand(len(table), 3, 3)
        for channel in of_joint:
            if channel.endswith("rotation"):
                axis = torch.zeros(3, dtype=torch.float64)
                axis["XYZ".index(channel[0])] = 1
                R = R @ rotation(torch.deg2rad(table[:, column])[:, None] * axis)
            column += 1
        rotations.append(R)
    offsets[0] = [0.0, 0.0, 0.0]
    return Skeleton(names, parents, torch.tensor(offsets, dtype=torch.float64)), torch.stack(rotations, 1)


def rotation(axis_angle: Tensor) -> Tensor:
    """(..., 3, 3): Rodrigues' formula; smooth at 0."""
    square = axis_angle.square().sum(-1)[..., None, None]
    angle = square.clamp(min=1e-12).sqrt()
    x, y, z = axis_angle.unbind(-1)
    o = torch.zeros_like(x)
    K = torch.stack([o, -z, y, z, o, -x, -y, x, o], -1).view(*axis_angle.shape[:-1], 3, 3)
    small = square < 1e-6
    first = torch.where(small, 1 - square / 6, angle.sin() / angle)
    second = torch.where(small, 0.5 - square / 24, (1 - angle.cos()) / angle.square())
    return torch.eye(3, dtype=x.dtype, device=x.device) + first * K + second * (K @ K)


def axis_angle(R: Tensor) -> Tensor:
    """(..., 3) of rotations by less than pi."""
    from scipy.spatial.transform import Rotation

    found = Rotation.from_matrix(R.reshape(-1, 3, 3).numpy()).as_rotvec()
    return torch.from_numpy(found).view(*R.shape[:-2], 3)


def positions(skeleton: Skeleton, R: Tensor) -> Tensor:
    """(B, J, 3): joint positions, the root at 0, of rotations (B, J, 3, 3) relative to the parent."""
    offsets = skeleton.offsets.to(R)
    turned, found = [R[:, 0]], [offsets[0].expand(len(R), 3)]
    for joint, parent in list(enumerate(skeleton.parents))[1:]:
        found.append(found[parent] + turned[parent] @ offsets[joint])
        turned.append(turned[parent] @ R[:, joint])
    return torch.stack(found, 1)


@lru_cache
def clip() -> tuple[Skeleton, Tensor]:
    """The clip that comes with the package: skeleton, and axis-angle vectors (455, 19, 3) with the root turned to face the camera on average."""
    skeleton, R = read_bvh(gzip.decompress(CLIP.read_bytes()).decode())
    # The mean heading becomes 0: the x axis of the hips, projected to the ground.
    right = R[:, 0, :, 0].mean(0)
    heading = torch.atan2(-right[2], right[0])
    undo = rotation(torch.stack([torch.zeros_like(heading), -heading, torch.zeros_like(heading)]))
    R = torch.cat([(undo @ R[:, 0])[:, None], R[:, 1:]], 1)
    return skeleton, axis_angle(R)


class PoseProblems:
    """Draws problems from frames [first, last) of the clip: a task family of `meta_train`, and the data of the claim."""

    name = "pose"

    def __init__(self, first: int = 0, last: int = 300, mean_of: tuple[int, int] = (0, 300)) -> None:
        self.skeleton, theta = clip()
        self.frames, self.mean = theta[first:last].float(), theta[slice(*mean_of)].mean(0).float()
        self.start = torch.cat([self.mean.flatten(), torch.zeros(3)])

    def sample(self, batch: int, generator: torch.Generator) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
        """(f, x0 (batch, d), f_lo (batch,)) of random frames and views."""
        chosen = torch.randint(len(self.frames), (batch,), generator=generator)
        angles = (2 * torch.rand(2, batch, generator=generator) - 1) * torch.tensor([[YAW], [PITCH]])
        f, _ = self.problems(chosen, angles)
        return f, self.start.repeat(batch, 1), torch.zeros(batch)

    def problems(self, frames: Tensor, angles: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """The losses (B, d) -> (B,) of these frames seen at yaw and pitch `angles` (2, B), and the true positions (B, J, 3)."""
        nothing = torch.zeros(len(frames))
        view = rotation(torch.stack([angles[1], nothing, nothing], 1)) @ rotation(
            torch.stack([nothing, angles[0], nothing], 1)
        )
        R = rotation(self.frames[frames])
        R = torch.cat([(view @ R[:, 0])[:, None], R[:, 1:]], 1)
        truth = positions(self.skeleton, R)
        seen = truth[..., :2] + torch.tensor([0.05, -0.05])  # the camera is not centred on the hips

        def f(x: Tensor) -> Tensor:
            theta = x[:, :-3].view(len(x), -1, 3)
            found = positions(self.skeleton, rotation(theta))[..., :2]
            camera = x[:, -3:]
            error = (1 + camera[:, None, :1]) * found + camera[:, None, 1:] - seen.to(x)
            return error.square().sum((1, 2)) + PRIOR * (theta - self.mean.to(x)).square().sum((1, 2))

        return f, truth

    def found(self, x: Tensor) -> Tensor:
        """(B, J, 3): the joint positions of solutions (B, d)."""
        return positions(self.skeleton, rotation(x[:, :-3].view(len(x), -1, 3)))


def pa_mpjpe(found: Tensor, truth: Tensor) -> Tensor:
    """(B,): mean distance of joints (B, J, 3) in millimetres after the best similarity transform (Procrustes)."""
    a, b = (value.double() - value.double().mean(1, keepdim=True) for value in (found, truth))
    U, S, Vh = torch.linalg.svd(a.mT @ b)
    signs = torch.ones_like(S)
    signs[:, 2] = torch.linalg.det(U @ Vh).sign()
    turn = U * signs[:, None] @ Vh
    scale = (S * signs).sum(1) / a.square().sum((1, 2))
    return (scale[:, None, None] * (a @ turn) - b).norm(dim=2).mean(1) * 1000
