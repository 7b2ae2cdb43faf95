"""A recipe made real: mesh, layout, data, model, optimizer and step, each a value that can be looked at.

    run = Run(load_recipe("debug"))
    state = run.init()
    state, metrics = run.step(state, run.batch(0))

`ftrain train` is a loop over `run.step`: loop.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from ftrain import fp8, hf, optim, tree
from ftrain.data import Data, Progress, Tokenizer, open_data, tokenizer_of
from ftrain.execution import Execution
from ftrain.launch import World
from ftrain.machine import too_large
from ftrain.marks import Mark, unmarked
from ftrain.models import family
from ftrain.nn import IGNORE
from ftrain.param import Param
from ftrain.recipe import Recipe, RecipeError, accumulation, check, model_config, model_family, resolve_parallel, tables
from ftrain.sampling import generate
from ftrain.sharding import Mesh, MeshShape, initialize, local_shape, make_mesh, to_local
from ftrain.step import TrainState, init_state, make_eval_step, make_global_norm, make_train_step
from ftrain.transforms import why_no_jit
from ftrain.tree import Tree

DTYPES = {name: getattr(torch, name) for name in tables.DTYPES}


class Run:
    """Everything that a recipe stands for, on this rank. Nothing is printed; `notes` says what the machine changed.

    Raises RecipeError or ValueError, before anything large is allocated, for what cannot work.
    """

    def __init__(
        self,
        recipe: Recipe,
        world: World | None = None,
        device: torch.device | str | None = None,
        mesh: Mesh | None = None,  # to run on, or to pretend to (report/planned.py); None: made from the recipe
        mark: Mark = unmarked,  # names what runs, for a profile
        tokenising: Progress | None = None,  # is told how tokenising goes: bytes of text done, and all there are
    ):
        self.recipe, self.tokenising = recipe, tokenising
        self.world = world or World()
        self.device = torch.device(device) if device else default_device(self.world)
        self.family = family(model_family(recipe.model))
        self.cfg = model_config(recipe.model)
        if problems := check(recipe, self.world.world_size):
            raise RecipeError(problems)
        parallel = resolve_parallel(recipe.parallel, self.world.world_size)
        self.mesh_shape = MeshShape(parallel.replicate, parallel.tensor, parallel.shard)
        self.micro_batches = accumulation(recipe, self.mesh_shape.data)
        self.notes: list[str] = []
        in_fp8 = self._in_fp8()
        compile = recipe.train.compile
        if compile and (why := why_no_jit(self.device)):
            compile = False
            self.notes.append(why)
        self.mesh = mesh or make_mesh(self.mesh_shape, self.device, recipe.parallel.timeout)
        self.execution = Execution(
            mesh=self.mesh,
            compute_dtype=DTYPES[recipe.precision.compute],
            wire_dtype=None if recipe.precision.gather == "compute" else DTYPES[recipe.precision.params],
            reduce_dtype=DTYPES[recipe.precision.reduce],
            reshard_after_forward=recipe.parallel.reshard_after_forward,
            remat=recipe.train.remat,
            compile=compile,
            loss_chunks=recipe.train.loss_chunks,
            fp8=in_fp8,
            mark=mark,
        )
        self.dtype = DTYPES[recipe.precision.params]
        self.abstract = tree.map(lambda p: Param(p.shape, p.axes, p.init, self.dtype), self.family.abstract(self.cfg))
        self.plans = self.execution.plans(self.abstract)
        tokens = recipe.train.micro_batch_size * recipe.data.seq_len
        self.notes += in_fp8.notes(self.abstract, self.plans, self.mesh_shape, self.device.type, tokens, compile)
        self.model = self.family.make_model(self.cfg, self.execution)
        self.optimizer = make_optimizer(recipe, make_global_norm(self.mesh, self.plans))
        self.post = self.execution.post(self.abstract)
        self.step = make_train_step(
            self.model.loss,
            self.optimizer,
            self.post,
            mesh=self.mesh,
            plans=self.plans,
            micro_batches=self.micro_batches,
            donate=True,
            skip_nonfinite=recipe.train.on_nonfinite == "skip",
            mark=mark,
            prepare=self.execution.prepare,
        )
        self._evaluate = make_eval_step(self.model.loss, mesh=self.mesh)

    def _in_fp8(self) -> fp8.Fp8:
        """Which weights run in fp8, and how. Raises RecipeError for what this machine or the layout cannot do."""
        use = fp8.use(self.recipe.fp8, self.family.product_weights(self.cfg))
        capability = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None
        names = tree.names(self.family.abstract(self.cfg))
        known = None if self.device.type == "meta" else self.device.type  # a rehearsal is for any device (report/)
        if problems := use.problems(names, known, capability, self.mesh_shape.tensor):
            raise RecipeError(problems)
        return use

    @cached_property
    def data(self) -> Data:
        """The recipe's text as batches: `data.train`, `data.validation`, `data.tokenizer`. Opened when first used."""
        recipe = self.recipe
        return open_data(recipe.data, vocab_size=self.cfg.vocab_size, seed=recipe.train.seed, progress=self.tokenising)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the recipe. Opens no text, unless it is trained on that."""
        return self.data.tokenizer if "data" in vars(self) else tokenizer_of(self.recipe.data)

    @cached_property
    def pretrained(self) -> hf.Checkpoint | None:
        """The checkpoint of model.hf, its headers read and checked; None without one. Collective. Raises HfError."""
        return None if self.recipe.model.hf is None else hf.open_checkpoint(self.recipe.model.hf)

    def init(self, pretrained: bool = True) -> TrainState:
        """The state before the first step. The same full values on every mesh.

        pretrained: as of `params`. Raises RecipeError, before anything is allocated, where this machine cannot hold it;
        HfError for a checkpoint that does not fit.
        """
        if problem := too_large(self._state_bytes(), self.device, self.world.local_size):
            raise RecipeError([problem])
        return init_state(self.params(pretrained), self.optimizer, self.post)

    def params(self, pretrained: bool = True) -> Any:
        """The parameters before the first step: those of model.hf, where the recipe has one, or of the seed.

        pretrained: False: of the seed in any case, for a state whose values will be replaced. Collective. Raises as
        `init` does.
        """
        if problem := too_large(self._state_bytes(trained=False), self.device, self.world.local_size):
            raise RecipeError([problem])
        if pretrained and self.pretrained:
            return hf.read_params(self.pretrained, self.abstract, self.plans, self.mesh, self.dtype)
        return initialize(self.abstract, self.plans, self.mesh, self.recipe.train.seed)

    def _state_bytes(self, trained: bool = True) -> int:
        """Bytes of the parameters on rank 0, which holds the most, and of the optimizer's state where it is trained."""
        local = tree.map(
            lambda param, plan: torch.empty(
                local_shape(param.shape, plan.stored, self.mesh_shape, 0), dtype=param.dtype, device="meta"
            ),
            self.abstract,
            self.plans,
        )
        leaves = tree.leaves((local, self.optimizer.init(local) if trained else None))
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """This rank's sequences of step `step` (from 0), on its device: int64 tensors (rows, seq_len)."""
        rows = self.recipe.data.global_batch_size // self.mesh_shape.data
        first = self.mesh_shape.data_index(self.mesh.rank) * rows
        return self._place(self.data.train.batch(step, rows=slice(first, first + rows)))

    def evaluate(self, state: TrainState) -> tuple[float, int]:
        """(sum of the token losses in nats, number of tokens) over the held-out sequences, exact on any mesh.

        Ranks that run out of sequences go on with empty ones, so all make the same calls in the same shapes.
        """
        held_out, rows = self.data.validation, self.recipe.train.micro_batch_size
        count = min(self.recipe.validation.sequences, held_out.windows.n_windows)
        stride = rows * self.mesh_shape.data
        total, tokens = 0.0, 0
        for first in range(0, count, stride):
            start = min(first + self.mesh_shape.data_index(self.mesh.rank) * rows, count)
            batch = held_out.batch(start, min(start + rows, count))
            loss, counted = self._evaluate(state, self._place(_padded(batch, rows)))
            total, tokens = total + loss.item(), tokens + int(counted.item())
        return total, tokens

    def generate(
        self, state: TrainState, prompt: list[int], n: int, temperature: float = 0.0, seed: int = 0
    ) -> list[int]:
        """`n` token ids that follow `prompt`, as sampling.generate says. All ranks must call."""
        params, weights = to_local(state.params), state.fp8_state and state.fp8_state.weights
        return generate(
            lambda tokens: self._eager_model.logits(params, tokens, fp8=weights),
            prompt,
            n,
            seq_len=self.recipe.data.seq_len,
            temperature=temperature,
            seed=seed,
            group=self.mesh.group("tensor"),
            device=self.device,
        )

    @cached_property
    def _eager_model(self) -> Any:
        # Generation runs one sequence, a shape of its own: compiling for it would take longer than it saves.
        return self.family.make_model(self.cfg, replace(self.execution, compile=False))

    @cached_property
    def n_params(self) -> int:
        """Parameters of the whole model."""
        return sum(param.numel for param in tree.leaves(self.abstract))

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations that the model needs for one token, forward and backward."""
        return self.family.flops_per_token(self.cfg, self.recipe.data.seq_len)

    def _place(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}


def default_device(world: World) -> torch.device:
    """This rank's GPU where there is one for it, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", world.local_rank)
    return torch.device("cpu")


def make_optimizer(recipe: Recipe, norm: Callable[[Tree], torch.Tensor] = optim.global_norm) -> optim.Optimizer:
    """The optimizer of the recipe: clipping by the global norm, then the update rule under its schedule."""
    options, rates = recipe.optimizer, recipe.schedule
    lr = optim.schedule(
        rates.decay,
        options.lr,
        steps=recipe.train.steps,
        warmup_steps=rates.warmup_steps,
        decay_steps=rates.decay_steps,
        min_lr_ratio=rates.min_lr_ratio,
    )
    common = {"weight_decay": options.weight_decay, "moments": DTYPES[recipe.precision.moments]}
    if options.name == "sgd":
        rule = optim.sgd(lr, momentum=options.betas[0], **common)
    else:
        rule = optim.adamw(lr, betas=options.betas, eps=options.eps, **common)
    return optim.chain(optim.clip_by_global_norm(options.clip_norm or float("inf"), norm=norm), rule)


def _padded(batch: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """A batch of exactly `rows` sequences: what is missing is filled with sequences of which nothing counts."""
    fill = {"tokens": 0, "targets": IGNORE, "segments": 0}
    missing = rows - len(batch["tokens"])
    return {
        key: torch.cat([value, value.new_full((missing, value.shape[1]), fill[key])]) for key, value in batch.items()
    }
