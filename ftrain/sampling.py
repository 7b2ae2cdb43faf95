"""Text from a model: one token at a time, greedy or sampled."""

from collections.abc import Callable

import torch

from ftrain.collectives import Group, all_gather


def generate(
    logits: Callable[[torch.Tensor], torch.Tensor],
    prompt: list[int],
    n: int,
    *,
    seq_len: int,
    temperature: float = 0.0,
    seed: int = 0,
    group: Group = None,
    device: torch.device | str = "cpu",
) -> list[int]:
    """The `n` token ids that follow `prompt`.

    logits: int64 tokens (1, seq_len) -> (1, seq_len, V). Over a `group` each rank gives its slice of the vocabulary,
        and all ranks must call.
    temperature: 0 takes the likeliest token; above it tokens are drawn from softmax(logits / temperature) with `seed`.

    The model sees the last `seq_len` tokens, padded on the right, where causal attention does not look: every call has
    one shape. Raises ValueError for an empty prompt.
    """
    if not prompt:
        raise ValueError("generate needs at least one token to start from; the prompt is empty")
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(n):
        window = ids[-seq_len:]
        tokens = torch.zeros(1, seq_len, dtype=torch.int64)
        tokens[0, : len(window)] = torch.tensor(window)
        with torch.no_grad():
            last = logits(tokens.to(device))[:, len(window) - 1]
            last = all_gather(last, 1, group)[0].float().cpu()
        if temperature == 0:
            token = int(last.argmax())
        else:
            token = int(torch.multinomial((last / temperature).softmax(-1), 1, generator=generator))
        ids.append(token)
    return ids[len(prompt) :]
