"""The model against the same mathematics written another way, and its declared sizes."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import grad_and_value

from ftrain import tree
from ftrain.execution import Execution
from ftrain.models import llama
from ftrain.nn import IGNORE
from ftrain.param import initial_rows
from ftrain.sharding import MeshShape, initialize

CFG = llama.Config(vocab_size=64, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, ffn_dim=48)
TIED = replace(CFG, tie_embeddings=True)
SCALED = replace(
    CFG,
    rope_theta=10000.0,
    norm_eps=1e-3,
    rope_scaling={
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
)


class Reference(nn.Module):
    """A Llama as a plain module, in fp64, with none of ftrain's code: complex rotations, explicit softmax."""

    def __init__(self, cfg, params):
        super().__init__()
        self.cfg = cfg
        self.weights = nn.ParameterDict(
            {path.replace(".", "/"): nn.Parameter(leaf.double()) for path, leaf in tree.named_leaves(params)}
        )

    def turns(self, seq):
        cfg, frequencies = self.cfg, []
        for i in range(cfg.head_dim // 2):
            f, s = cfg.rope_theta ** (-2 * i / cfg.head_dim), cfg.rope_scaling
            if s:
                wavelength, length = 2 * math.pi / f, s["original_max_position_embeddings"]
                share = (length / wavelength - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
                share = min(1.0, max(0.0, share))
                f = f * share + f / s["factor"] * (1 - share)
            frequencies.append(f)
        angles = torch.arange(seq)[:, None] * torch.tensor(frequencies)  # rounded to fp32, as ftrain's table is
        return torch.complex(angles.cos().double(), angles.sin().double())

    def norm(self, x, name):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.cfg.norm_eps) * self.weights[name]

    def rotated(self, x, seq):
        half = self.cfg.head_dim // 2
        z = torch.complex(x[..., :half], x[..., half:]) * self.turns(seq)
        return torch.cat([z.real, z.imag], -1)

    def attend(self, h, i, seq):
        heads = []
        e, group = self.cfg.head_dim, self.cfg.n_heads // self.cfg.n_kv_heads
        q, k, v = (h @ self.weights[f"layers/{i}/{name}"].T for name in ("wq", "wk", "wv"))
        for j in range(self.cfg.n_heads):
            mine, shared = slice(j * e, (j + 1) * e), slice(j // group * e, (j // group + 1) * e)
            scores = self.rotated(q[..., mine], seq) @ self.rotated(k[..., shared], seq).mT / math.sqrt(e)
            scores = scores + torch.full((seq, seq), -math.inf).double().triu(1)
            heads.append(scores.softmax(-1) @ v[..., shared])
        return torch.cat(heads, -1) @ self.weights[f"layers/{i}/wo"].T

    def forward(self, tokens):
        x = self.weights["embedding"][tokens]
        for i in range(self.cfg.n_layers):
            x = x + self.attend(self.norm(x, f"layers/{i}/attention_norm"), i, tokens.shape[1])
            h = self.norm(x, f"layers/{i}/mlp_norm")
            gate, up = (h @ self.weights[f"layers/{i}/{name}"].T for name in ("w_gate", "w_up"))
            x = x + (gate * torch.sigmoid(gate) * up) @ self.weights[f"layers/{i}/w_down"].T
        output = self.weights["embedding" if self.cfg.tie_embeddings else "output"]
        return self.norm(x, "norm") @ output.T

    def gradients(self, batch):
        """(loss, {path: gradient}), the loss summed over targets that count."""
        chosen = self(batch["tokens"]).log_softmax(-1).gather(-1, batch["targets"].clamp(min=0)[..., None])[..., 0]
        loss = -chosen[batch["targets"] != IGNORE].sum()
        names = list(self.weights)
        grads = torch.autograd.grad(loss, [self.weights[name] for name in names])
        return loss, {name.replace("/", "."): g for name, g in zip(names, grads, strict=True)}


def parameters(cfg, dtype=torch.float32):
    """Matrices 8 times their initial values, so that attention and gates are not linear; uneven norms."""

    def one(path, param):
        if path.endswith("norm"):
            return torch.linspace(0.5, 1.5, *param.shape, dtype=dtype)
        return 8 * initial_rows(path, param, seed=7).to(dtype)

    return tree.map_named(one, llama.abstract(cfg))


def batch_of(cfg, sequences=3, seq_len=16):
    tokens = torch.randint(0, cfg.vocab_size, (sequences, seq_len + 1), generator=torch.Generator().manual_seed(3))
    targets = tokens[:, 1:].clone()
    targets[0, 5:] = IGNORE
    return {"tokens": tokens[:, :-1], "targets": targets}


def gradients(cfg, params, batch, **options):
    """(loss, count, {path: gradient}) by torch.func."""
    model = llama.make_model(cfg, Execution(**options))
    grads, (loss, count) = grad_and_value(lambda p: model.loss(p, batch), has_aux=True)(params)
    return loss, count, dict(tree.named_leaves(grads))


FP64 = {"compute_dtype": torch.float64, "reduce_dtype": torch.float64}


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize("cfg", [CFG, TIED, SCALED], ids=["plain", "tied", "scaled"])
def test_loss_and_every_gradient_are_those_of_a_plain_module(cfg, dtype, tolerance):
    params, batch = parameters(cfg, dtype), batch_of(cfg)
    loss, count, grads = gradients(cfg, params, batch, **(FP64 if dtype == torch.float64 else {}))
    expected_loss, expected = Reference(cfg, params).gradients(batch)
    assert count == 5 + 2 * 16
    assert abs(loss - expected_loss) <= tolerance * expected_loss
    assert sorted(grads) == sorted(expected)
    for path, want in expected.items():
        assert want.norm() > 0, f"{path}: a gradient of zero proves nothing"
        assert (grads[path] - want).norm() <= tolerance * want.norm(), path


@pytest.mark.parametrize("path", ["embedding", "layers.0.wq", "layers.1.w_down", "layers.0.mlp_norm", "norm", "output"])
def test_gradients_are_differences_of_losses(path):
    params, batch = parameters(CFG, torch.float64), batch_of(CFG)
    _, _, grads = gradients(CFG, params, batch, **FP64)
    loss = llama.make_model(CFG, Execution(**FP64)).loss
    leaf, h = dict(tree.named_leaves(params))[path].view(-1), 1e-5
    for index in grads[path].view(-1).abs().topk(5).indices:
        value, ends = leaf[index].item(), []
        for sign in (1, -1):
            leaf[index] = value + sign * h
            with torch.no_grad():
                ends.append(loss(params, batch)[0])
            leaf[index] = value
        assert grads[path].view(-1)[index].item() == pytest.approx(((ends[0] - ends[1]) / (2 * h)).item(), rel=1e-4)


def test_the_gradient_of_a_tied_matrix_is_the_sum_of_both_uses():
    params, batch = parameters(TIED), batch_of(TIED)
    loss, _, tied = gradients(TIED, params, batch)
    untied_loss, _, untied = gradients(CFG, params | {"output": params["embedding"]}, batch)
    assert torch.equal(loss, untied_loss)
    both = untied["embedding"] + untied["output"]
    assert (tied["embedding"] - both).norm() <= 1e-6 * both.norm()
    assert "output" not in tied


@pytest.mark.parametrize("chunks", [1, 3, 5, 16, 99])
def test_the_loss_in_chunks_is_the_loss(chunks):
    params, batch = parameters(CFG), batch_of(CFG)
    loss, count, grads = gradients(CFG, params, batch, loss_chunks=chunks)
    whole, whole_count, expected = gradients(CFG, params, batch)
    assert count == whole_count and torch.allclose(loss, whole, rtol=1e-6)
    for path, want in expected.items():
        assert (grads[path] - want).norm() <= 1e-5 * want.norm(), path


def test_plain_autograd_gives_what_torch_func_gives():
    params, batch = parameters(CFG), batch_of(CFG)
    loss, _, expected = gradients(CFG, params, batch)
    leaves = [leaf.requires_grad_() for leaf in tree.leaves(params)]
    value, _ = llama.make_model(CFG).loss(params, batch)
    assert torch.equal(value, loss)
    for got, want in zip(torch.autograd.grad(value, leaves), expected.values(), strict=True):
        assert torch.equal(got, want)


def test_the_loss_is_the_cross_entropy_of_the_logits():
    params, batch = parameters(CFG), batch_of(CFG)
    model = llama.make_model(CFG)
    with torch.no_grad():
        logits = model.logits(params, batch["tokens"])
        loss, _ = model.loss(params, batch)
    assert logits.shape == (3, 16, 64)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    assert torch.allclose(loss, expected, rtol=1e-6)


def test_a_position_sees_nothing_that_comes_later():
    params, tokens = parameters(CFG), batch_of(CFG)["tokens"]
    logits = llama.make_model(CFG).logits
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % CFG.vocab_size
    with torch.no_grad():
        before, after = logits(params, tokens), logits(params, changed)
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-6)
    assert (before[:, 9:] - after[:, 9:]).abs().amax(-1).min() > 1e-3


# --- documents in one sequence -----------------------------------------------------------------------------


def documents(lengths, seq_len=16):
    """One sequence of several documents, and each document by itself."""
    tokens = torch.randint(0, 64, (1, seq_len), generator=torch.Generator().manual_seed(4))
    targets = torch.randint(0, 64, (1, seq_len), generator=torch.Generator().manual_seed(5))
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(0)
    together = {"tokens": tokens, "targets": targets, "segments": segments}
    pieces = zip(tokens.split(lengths, dim=1), targets.split(lengths, dim=1), strict=True)
    return together, [{"tokens": t, "targets": y} for t, y in pieces]


def test_documents_that_share_a_sequence_are_as_if_each_were_alone():
    params = parameters(CFG)
    together, alone = documents([5, 1, 10])
    loss, _, grads = gradients(CFG, params, together)
    parts = [gradients(CFG, params, one) for one in alone]
    assert torch.allclose(loss, sum(part[0] for part in parts), rtol=1e-5)
    for path, got in grads.items():
        want = sum(part[2][path] for part in parts)
        assert (got - want).norm() <= 1e-5 * want.norm(), path
    mixed, _, _ = gradients(CFG, params, {key: together[key] for key in ("tokens", "targets")})
    assert abs(mixed - loss) > 1e-2, "without segments the documents do not see each other either"


def test_a_documents_loss_does_not_depend_on_its_neighbours():
    params = parameters(CFG)
    together, _ = documents([5, 6, 5])
    together["targets"][:, :5] = together["targets"][:, 11:] = IGNORE
    loss, count, _ = gradients(CFG, params, together)
    outside = together["segments"] != 1
    together["tokens"][outside] = (together["tokens"][outside] + 7) % 64
    changed, _, grads = gradients(CFG, params, together)
    assert count == 6 and torch.equal(loss, changed)
    seen = torch.zeros(64, dtype=torch.bool).index_fill(0, together["tokens"][~outside], True)
    assert (grads["embedding"][~seen] == 0).all(), "a neighbour's tokens have a gradient"


# --- sizes and initial values ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,count",
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
    ],
)
def test_presets_have_the_published_sizes(name, count):
    assert sum(param.numel for param in tree.leaves(llama.abstract(llama.PRESETS[name]))) == count


def test_small_sizes_by_hand():
    assert sum(param.numel for param in tree.leaves(llama.abstract(CFG))) == 8272
    assert sum(param.numel for param in tree.leaves(llama.abstract(TIED))) == 7248


@pytest.mark.parametrize("cfg", [CFG, TIED])
def test_globs_of_products_name_every_matrix_that_multiplies(cfg):
    from fnmatch import fnmatchcase

    paths = tree.names(llama.abstract(cfg))
    chosen = {path for path in paths if any(fnmatchcase(path, glob) for glob in llama.product_weights(cfg))}
    others = {path for path in paths if path.endswith("norm")} | (set() if cfg.tie_embeddings else {"embedding"})
    assert chosen == set(paths) - others


def test_initial_values_depend_on_the_seed_and_the_path_only():
    def initial(cfg, seed):
        execution, declared = Execution(), llama.abstract(cfg)
        return dict(tree.named_leaves(initialize(declared, execution.plans(declared), execution.mesh, seed)))

    first, again, other = initial(CFG, 0), initial(CFG, 0), initial(CFG, 1)
    deeper = initial(replace(CFG, n_layers=3), 0)
    for path, leaf in first.items():
        assert torch.equal(leaf, again[path])
        if not path.endswith("norm"):
            assert not torch.equal(leaf, other[path])
        if not path.endswith(("wo", "w_down")):  # whose spread depends on the depth
            assert torch.equal(leaf, deeper[path])
    assert first["layers.0.wo"].std() < first["layers.0.wq"].std()
    assert not torch.equal(first["layers.0.wq"], first["layers.1.wq"])


def test_a_layout_that_cannot_work_is_told_before_anything_is_made():
    from ftrain.sharding import Mesh, ShardingError

    with pytest.raises(ShardingError, match="layers.0.wk.*parallel.tensor=4"):
        Execution(mesh=Mesh(MeshShape(tensor=4))).plans(llama.abstract(replace(CFG, head_dim=1)))
