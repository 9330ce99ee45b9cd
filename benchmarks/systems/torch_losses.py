"""The policy losses in eager torch: the formulas of `jaxrl/losses`, as a torch library writes them.

Each maps (log_probs, old, rollout, advantages, mask, config), tensors [B, T], to the loss of each
token. The double-where that keeps NaN out of masked positions is left out, to torch's advantage.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Any], Tensor]


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    return (x * mask).sum(dim) / mask.sum(dim).clamp(min=1.0)


def safe_exp(x: Tensor) -> Tensor:
    return x.clamp(-20, 20).exp()


def clipped(ratio: Tensor, advantages: Tensor, c: Any) -> Tensor:
    bounded = ratio.clamp(1 - c.eps_clip_low, 1 + c.eps_clip_high)
    return -torch.minimum(ratio * advantages, bounded * advantages)


def regular(x: Tensor, old: Tensor, rollout: Tensor, a: Tensor, mask: Tensor, c: Any) -> Tensor:
    return clipped(safe_exp(x - old), a, c)


def dual_clip(x: Tensor, old: Tensor, rollout: Tensor, a: Tensor, mask: Tensor, c: Any) -> Tensor:
    loss = clipped(safe_exp(x - old), a, c)
    return torch.where(a < 0, torch.minimum(loss, -c.clip_ratio_c * a), loss)


def gspo(x: Tensor, old: Tensor, rollout: Tensor, a: Tensor, mask: Tensor, c: Any) -> Tensor:
    sequence = masked_mean(x - old, mask, -1)[:, None]
    return clipped((x - x.detach() + sequence.detach()).clamp(max=10.0).exp(), a, c)


def sapo(x: Tensor, old: Tensor, rollout: Tensor, a: Tensor, mask: Tensor, c: Any) -> Tensor:
    positive, negative = (torch.full_like(a, t) for t in (c.sapo.tau_pos, c.sapo.tau_neg))
    tau = torch.where(a > 0, positive, negative)
    return -(4 / tau) * torch.sigmoid(tau * (safe_exp(x - old) - 1)) * a


def cispo(x: Tensor, old: Tensor, rollout: Tensor, a: Tensor, mask: Tensor, c: Any) -> Tensor:
    low, high = 1 - c.cispo.cispo_eps_clip_low, 1 + c.cispo.cispo_eps_clip_high
    return -safe_exp(x - old).clamp(low, high).detach() * a * x


def rollout_is(x: Tensor, old: Tensor, rollout: Tensor, a: Tensor, mask: Tensor, c: Any) -> Tensor:
    ratio = safe_exp(x - rollout).detach()
    inside = (ratio > 1 - c.eps_clip_low) & (ratio < 1 + c.eps_clip_high)
    return -ratio * inside * a * x


def dppo(x: Tensor, old: Tensor, rollout: Tensor, a: Tensor, mask: Tensor, c: Any) -> Tensor:
    difference = x.detach().exp() - rollout.exp()
    dropped = (a > 0) & (difference > c.dppo.delta_high)
    dropped |= (a < 0) & (-difference > c.dppo.delta_low)
    return -safe_exp(x - rollout) * a * ~dropped


def decoupled_ppo(
    x: Tensor, old: Tensor, rollout: Tensor, a: Tensor, mask: Tensor, c: Any
) -> Tensor:
    weight = safe_exp(old - rollout)
    return weight * (weight <= c.decoupled_ppo.behave_cap) * clipped(safe_exp(x - old), a, c)


def covariance(x: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    return (a - masked_mean(a, mask)) * (x.detach() - masked_mean(x.detach(), mask))


def clip_cov(x: Tensor, old: Tensor, rollout: Tensor, a: Tensor, mask: Tensor, c: Any) -> Tensor:
    ratio = (x - old).exp()
    loss, cov = clipped(ratio, a, c), covariance(x, a, mask)
    kept = loss == -ratio * a
    inside = (cov > c.clip_cov.clip_cov_lb) & (cov < c.clip_cov.clip_cov_ub) & kept & (mask > 0)
    candidates = torch.nonzero(inside)
    count = max(int(c.clip_cov.clip_ratio * mask.sum()), 1)
    chosen = candidates[torch.randperm(len(candidates))[:count]]
    correction = torch.ones_like(loss)
    correction[chosen[:, 0], chosen[:, 1]] = 0
    return loss * correction


def kl_cov(x: Tensor, old: Tensor, rollout: Tensor, a: Tensor, mask: Tensor, c: Any) -> Tensor:
    log_ratio, valid = x - old, torch.nonzero(mask.flatten() > 0).squeeze(1)
    count = max(int(c.kl_cov.kl_cov_frac * len(valid)), 1)
    highest = valid[covariance(x, a, mask).flatten()[valid].topk(count).indices]
    penalized = torch.zeros_like(mask).flatten().index_fill(0, highest, 1.0).view_as(mask)
    return -log_ratio.exp() * a + penalized * c.kl_cov.ppo_kl_coef * log_ratio.abs()


def gmpo(x: Tensor, old: Tensor, rollout: Tensor, a: Tensor, mask: Tensor, c: Any) -> Tensor:
    log_ratio = x - old
    lower, upper = log_ratio.clamp(min=-c.eps_clip_low), log_ratio.clamp(max=c.eps_clip_high)
    ratio = safe_exp(masked_mean(torch.where(a < 0, lower, upper), mask, -1))[:, None]
    return -ratio * a


def importance_sampling(
    x: Tensor, old: Tensor, rollout: Tensor, a: Tensor, mask: Tensor, c: Any
) -> Tensor:
    return -(x - old).exp() * a


def cross_entropy(
    x: Tensor, old: Tensor, rollout: Tensor, a: Tensor, mask: Tensor, c: Any
) -> Tensor:
    return -x


LOSSES: dict[str, Loss] = {
    "regular": regular,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "sapo": sapo,
    "cispo": cispo,
    "rollout_is": rollout_is,
    "dppo": dppo,
    "decoupled_ppo": decoupled_ppo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "gmpo": gmpo,
    "importance_sampling": importance_sampling,
    "cross_entropy": cross_entropy,
}
