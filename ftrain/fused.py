"""AdamW in place, in one pass over memory where a kernel fits: ours, else torch's, else leaf by leaf.

Which leaves take which is decided by dtype, layout and device alone; the numbers are those of `optim.adamw`'s `update`.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from ftrain.kernels import adamw as kernel

FUSED_DEVICES = ("cpu", "cuda")  # where torch._fused_adamw_ was tried
PIECE = 1 << 22  # elements that the plain rule works on at once


def adamw_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    mu: list[torch.Tensor],
    nu: list[torch.Tensor],
    decays: list[bool],
    *,
    scale: torch.Tensor | float | None,
    keep_grads: bool,
    count: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One update of AdamW (arXiv:1711.05101, algorithm 2) of params, mu and nu, each in its own memory.

    The lists pair leaf by leaf. decays: which leaves `weight_decay` is for. scale: multiplies the gradients, 0-d or a
    number; None: nothing does. keep_grads: their memory is not written to. count: the number of this update, from 1.
    """
    constants: dict[str, Any] = {"count": count, "lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
    for decaying in (True, False):
        constants["weight_decay"] = weight_decay if decaying else 0.0
        chosen = [i for i, d in enumerate(decays) if d is decaying and params[i].numel()]
        quick = [i for i in chosen if _kernel_fits(params[i], mu[i], nu[i])]
        for i in quick:
            factor = _factor(scale, params[i])
            kernel.adamw_(params[i], grads[i].contiguous(), mu[i], nu[i], factor, **constants)
        rest = [i for i in chosen if i not in quick]
        p, g, m, v = ([leaves[i] for i in rest] for leaves in (params, grads, mu, nu))
        g = _workable(g, m, overwrite=scale is not None, keep=keep_grads)
        _adamw_(p, g, m, v, scale=scale, **constants)


def _kernel_fits(p: torch.Tensor, *moments: torch.Tensor) -> bool:
    dtypes = p.dtype == torch.float32 and all(m.dtype in kernel.MOMENTS for m in moments)
    return dtypes and all(t.is_contiguous() and kernel.runs_on(t) for t in (p, *moments))


def _factor(scale: torch.Tensor | float | None, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float32, device=like.device)


def _workable(
    grads: list[torch.Tensor], moments: list[torch.Tensor], *, overwrite: bool, keep: bool
) -> list[torch.Tensor]:
    """Gradients as the in-place kernel needs them: contiguous, in the arithmetic's dtype, free to be overwritten.

    The kernel reads the four tensors of a leaf as flat memory: a transposed gradient would pair wrong
    elements.
    Where a scale is applied it writes the scaled gradient back: a gradient that two leaves share, as that of
    (a + b).sum() may be, would be scaled twice.
    """
    result: list[torch.Tensor] = []
    seen: set[int] = set()
    for grad, m in zip(grads, moments, strict=True):
        g = grad.to(torch.promote_types(m.dtype, torch.float32)).contiguous()
        if overwrite and (g.data_ptr() in seen or (keep and g.data_ptr() == grad.data_ptr())):
            g = g.clone()
        seen.add(g.data_ptr())
        result.append(g)
    return result


def _adamw_(
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    mu: list[torch.Tensor],
    nu: list[torch.Tensor],
    *,
    scale: torch.Tensor | float | None,
    count: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW in place on lists of non-empty tensors: torch's fused kernel where it fits, or leaf by leaf."""
    rest = []
    groups: dict[Any, list[int]] = {}
    for i, (p, m) in enumerate(zip(params, mu, strict=True)):
        flat = p.is_contiguous() and m.is_contiguous() and nu[i].is_contiguous()
        if flat and p.dtype == m.dtype and p.device.type in FUSED_DEVICES and hasattr(torch, "_fused_adamw_"):
            groups.setdefault((p.device, p.dtype), []).append(i)
        else:
            rest.append(i)
    for (device, _), chosen in groups.items():
        count_ = torch.full((), float(count), device=device)  # the kernel wants it after this update
        inverse = None if scale is None else torch.as_tensor(1.0 / scale, dtype=torch.float32, device=device)
        torch._fused_adamw_(
            [params[i] for i in chosen],
            [grads[i] for i in chosen],
            [mu[i] for i in chosen],
            [nu[i] for i in chosen],
            [],
            [count_] * len(chosen),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            grad_scale=inverse,  # which the kernel divides by
            found_inf=None,
        )
    first, second = 1 - beta1**count, math.sqrt(1 - beta2**count)
    for i in rest:
        for p, g, m, v in _pieces(params[i], grads[i], mu[i], nu[i]):
            g = g if scale is None else g * scale
            m_, v_ = wide(m).lerp_(g, 1 - beta1), wide(v).mul_(beta2).addcmul_(g, g, value=1 - beta2)
            denominator = v_.sqrt().div_(second).add_(eps)
            p.copy_(p.to(m_.dtype).mul(1 - lr * weight_decay).addcdiv_(m_, denominator, value=-lr / first))
            if m_ is not m:
                m.copy_(m_), v.copy_(v_)


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of one shape in equal parts, so that what is widened is small beside what stays."""
    if not all(t.is_contiguous() for t in tensors):
        return iter([tensors])
    return zip(*(t.view(-1).split(PIECE) for t in tensors), strict=True)


def wide(moment: torch.Tensor) -> torch.Tensor:
    """A moment as arithmetic takes it: in float32 at least."""
    return moment.to(torch.promote_types(moment.dtype, torch.float32))
