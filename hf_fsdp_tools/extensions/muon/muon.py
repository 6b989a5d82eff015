"""Muon on shards: each matrix is orthogonalised once, by one rank, and AdamW steps what is no matrix."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from itertools import zip_longest
from typing import Any

import torch
import yaml
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hf_fsdp_tools.distributed.agreement import rank_and_size, same_on_all_ranks
from hf_fsdp_tools.distributed.shards import Box, Held
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.extensions.muon.matrices import BUCKET_BYTES, NEWTON_SCHULZ_STEPS, MatrixPlan, find_matrices
from hf_fsdp_tools.extensions.muon.owners import SENT_DTYPE, Matrix, Ownership, assign_owners, matrices_in
from hf_fsdp_tools.loading.regions import Piece
from hf_fsdp_tools.modeling.tree_copy import base_of, is_adapted
from hf_fsdp_tools.streaming.exchange import Exchange, connect
from hf_fsdp_tools.streaming.held import Part
from hf_fsdp_tools.streaming.outgoing import views_of_piece
from hf_fsdp_tools.streaming.routes import holders_of
from hf_fsdp_tools.text import did_you_mean, first_line


class Muon(torch.optim.Optimizer):
    """Muon for the hidden matrices of a sharded model, AdamW for all else, as one optimizer.

        model = from_pretrained("Qwen/Qwen3-8B", accelerator=accelerator)
        optimizer = Muon(model, lr=2e-4)
        model, optimizer = accelerator.prepare(model, optimizer)
        print(optimizer)                                # which parameters are matrices, and what the ranks send

    Each step is that of `torch.optim.Muon` on whole matrices: the same momentum, Newton-Schulz iteration and adjusted
    learning rate, by torch's own functions. Each matrix has one owner, which gets the shards of its update, runs the
    iteration, and sends the result back to all that hold shards of it, both in bfloat16, in which torch's iteration
    begins and ends. Owners have about as many operations each; the next matrices travel while those before are
    orthogonalised, and AdamW steps meanwhile. What a checkpoint holds as several tensors (query, key and value; gate
    and up; experts) is several matrices; a stack of experts is one for each.

    Momentum and AdamW's moments are shards like the parameters, for `torch.distributed.checkpoint` (DCP), `save_state`
    and a Trainer's checkpoints; another number of ranks reads them.

    Args:
        model: sharded by FSDP2 (with replicas, tensor and expert parallelism too), or plain; `prepare` hands the shards
            of a plain one to it.
        lr: of matrices, and of what AdamW steps unless `adamw_lr` is given.
        weight_decay: decoupled, of matrices and of AdamW's parameters of two dimensions and more; none of vectors.
        momentum, nesterov, ns_coefficients, eps, ns_steps: as of `torch.optim.Muon`.
        adjust_lr_fn: "match_rms_adamw", which lets the learning rate and weight decay be those of AdamW, or "original",
            torch's default.
        adamw_lr, betas, adamw_eps: of AdamW, which is torch's, fused.
        bucket_bytes: of matrices that a rank gets in one exchange.

    Every rank must call `step` with gradients of the same parameters. In the first step the ranks compare what they
    are going to send; each step exchanges through the default process group.

    Raises:
        ConfigError: the model trains no hidden matrix (adapters are none), is sharded by version 1 of FSDP, is on meta,
            or is no module; an option is wrong; torch has no Muon (before 2.9).

    Example:
        >>> model = from_pretrained("checkpoint", load_kwargs={"progress": False})
        >>> optimizer = Muon(model, lr=1e-3)
        >>> optimizer.matrices.matrices[0]
        'model.layers.0.self_attn.q_proj.weight'
        >>> ids = torch.tensor([[1, 5, 7, 9]])
        >>> model(input_ids=ids, labels=ids).loss.backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] | None = None,
        eps: float = 1e-7,
        ns_steps: int = NEWTON_SCHULZ_STEPS,
        adjust_lr_fn: str = "match_rms_adamw",
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        _refuse(model)
        base = base_of(model)
        self.matrices: MatrixPlan = find_matrices(base)
        """Which parameters are matrices, and why others are not."""
        if not self.matrices.matrices:
            cure = "Adapters go to AdamW" if is_adapted(model) else "Only linear layers inside repeated blocks are"
            raise ConfigError(f"{type(base).__name__} trains no matrices for Muon. {cure}: use torch.optim.AdamW.")
        named = dict(base.named_parameters())
        matrices = [named[name] for name in self.matrices.matrices]
        others = list({p: None for p in model.parameters() if p.requires_grad and p not in set(matrices)})
        decays = [([p for p in others if p.ndim > 1], weight_decay), ([p for p in others if p.ndim < 2], 0.0)]
        muon: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        muon |= {"eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        if ns_coefficients is not None:
            muon["ns_coefficients"] = ns_coefficients
        adamw: dict[str, Any] = {"lr": lr if adamw_lr is None else adamw_lr, "betas": betas, "eps": adamw_eps}
        nobody = nn.Parameter(torch.empty(1, 1))
        try:
            checked = torch.optim.Muon([nobody], **muon)
            self._rest = torch.optim.AdamW([nobody], **adamw, weight_decay=weight_decay, fused=True)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Muon: {error}.") from error
        # one kind's options in the place of the other's would be misread, so each group has its own next to the kind's
        groups: list[dict[str, Any]] = [{"params": group, "weight_decay": decay} for group, decay in decays if group]
        groups.insert(0, {"params": matrices, "is_muon": True, **checked.defaults})
        super().__init__(groups, {**self._rest.defaults, "is_muon": False})
        pieces = matrices_in(base, self.matrices.matrices)
        self._pieces: dict[torch.Tensor, tuple[Piece, ...]] = {
            p: pieces[name] for name, p in zip(self.matrices.matrices, matrices, strict=True)
        }
        self._bucket_bytes = bucket_bytes
        self._planned: dict[tuple[int, ...], Ownership] = {}

    def __repr__(self) -> str:
        options = {key: value for key, value in self.param_groups[0].items() if key not in ("params", "is_muon")}
        own = ", ".join(f"{key} {options[key]}" for key in ("lr", "weight_decay", "momentum", "adjust_lr_fn"))
        is_sharded = any(Held.of(p).mesh for p in self._pieces)  # a Trainer makes it of a plain model
        return f"{self.matrices}\n  Muon: {own}" + (f"; {self.ownership()}" if is_sharded else "")

    def hand_over(self, sharded: Mapping[torch.Tensor, nn.Parameter]) -> None:
        """Take sharded parameters in the place of whole ones; their groups and states are handed over already."""
        self._pieces = {sharded.get(p, p): pieces for p, pieces in self._pieces.items()}
        self._planned.clear()

    def ownership(self, matrices: Sequence[torch.Tensor] | None = None) -> Ownership:
        """Who orthogonalises what in a step in which these parameters have gradients, by default all matrices.

        Any rank may call; nothing is communicated.
        """
        chosen = list(self._pieces) if matrices is None else list(matrices)
        key = tuple(map(id, chosen))
        if key not in self._planned:
            if len(self._planned) == 8:  # where experts or adapters take turns, there are ever new sets
                del self._planned[next(iter(self._planned))]
            size = rank_and_size()[1] if any(Held.of(p).mesh for p in chosen) else 1
            self._planned[key] = assign_owners(
                [(i, piece) for i, p in enumerate(chosen) for piece in self._pieces[p]],
                list(holders_of(dict(enumerate(chosen)), size).values()),
                size,
                self._bucket_bytes,
            )
        return self._planned[key]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both kinds. Every rank must call."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._rest.param_groups = [group for group in self.param_groups if not group["is_muon"]]
        self._rest.state = self.state
        stepped = [
            _Stepped(p, self.state[p], group)
            for group in self.param_groups
            if group["is_muon"]
            for p in group["params"]
            if p.grad is not None
        ]
        if not stepped:
            self._rest.step()
            return loss
        parameters = [each.parameter for each in stepped]
        kind = Held.of(parameters[0]).device.type
        device = torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device(kind)
        is_new = tuple(map(id, parameters)) not in self._planned
        ownership = self.ownership(parameters)
        if is_new and ownership.num_ranks > 1:
            told = repr([(m.piece.source, m.owner, m.arrival.box.length) for m in ownership.matrices]).encode()
            same_on_all_ranks("planning Muon's step", matrices=hashlib.sha256(told).hexdigest())
            connect(device)
        for each in stepped:
            each.begin()
        _Step(stepped, ownership, device).run(self._rest.step)
        return loss


def _refuse(model: Any) -> None:
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ConfigError(f"Muon takes a model, which says what a matrix is, and no {kind}: Muon(model).")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ConfigError("Muon needs whole matrices, and version 1 of FSDP has flat parameters: use fsdp_version 2.")


class _Stepped:
    """A parameter of matrices in one step: this rank's shard of it, of its gradient and of its momentum."""

    def __init__(self, parameter: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
        assert parameter.grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad, memory_format=torch.preserve_format)
        self.parameter, self.group = parameter, group
        self._value, self._gradient, self._momentum = map(
            Held.of, (parameter, parameter.grad, state["momentum_buffer"])
        )
        self.lr = float(group["lr"])

    def begin(self) -> None:
        """Momentum and weight decay, element by element, as in torch's `_single_tensor_muon`."""
        self._momentum.memory.lerp_(self._gradient.memory, 1 - self.group["momentum"])
        self._value.memory.mul_(1 - self.lr * self.group["weight_decay"])

    def updates(self, piece: Piece) -> Iterator[Part]:
        """Yield what goes into the iteration of a matrix, of what this rank holds of it."""
        for (held, momentum), (_, gradient) in zip(self._momentum.parts(), self._gradient.parts(), strict=True):
            both = (momentum.contiguous(), gradient.contiguous())
            views = (views_of_piece(piece, memory, held, self.parameter.shape) for memory in both)
            for (box, momentum), (_, gradient) in zip(*views, strict=True):
                data = gradient.lerp(momentum, self.group["momentum"]) if self.group["nesterov"] else momentum
                yield Part(name="", box=box, data=data.to(SENT_DTYPE), dtype=SENT_DTYPE)

    def apply(self, piece: Piece, updates: Mapping[Box, torch.Tensor]) -> None:
        """Add what came of the iteration to what this rank holds of a matrix."""
        from torch.optim._muon import _adjust_lr

        lr = _adjust_lr(self.lr, self.group["adjust_lr_fn"], torch.Size(piece.box.length))
        for held, memory in self._value.parts():
            contiguous = memory.contiguous()
            for box, values in views_of_piece(piece, contiguous, held, self.parameter.shape):
                values.add_(updates[box].to(memory.device), alpha=-lr)
            if contiguous.data_ptr() != memory.data_ptr():  # this rank holds several ranges of one dimension
                memory.copy_(contiguous)


class _Step:
    """The matrices of one step on their ways to their owners and back."""

    def __init__(self, stepped: Sequence[_Stepped], ownership: Ownership, device: torch.device) -> None:
        self._stepped, self._ownership, self._device = stepped, ownership, device
        self._rank = rank_and_size()[0] if ownership.num_ranks > 1 else 0

    def run(self, meanwhile: Callable[[], Any]) -> None:
        """Step all matrices; `meanwhile` is called while the first ones travel."""
        matrices = self._ownership.matrices
        home = [[each] for each in matrices if each.is_home and each.owner == self._rank]
        buckets = [[matrices[i] for i in bucket] for bucket in self._ownership.buckets]
        coming = self._gather(buckets[0]) if buckets else None
        meanwhile()
        for bucket in home:
            self._apply(bucket, self._send_back(bucket, self._gather(bucket)))
        going: list[tuple[list[Matrix], Exchange]] = []
        for bucket, following in zip_longest(buckets, buckets[1:]):
            assert coming is not None
            came, coming = coming, self._gather(following) if following else None
            going.append((bucket, self._send_back(bucket, came)))
            if len(going) > 1:
                self._apply(*going.pop(0))
        for each in going:
            self._apply(*each)

    def _gather(self, bucket: Sequence[Matrix]) -> Exchange:
        """Begin to send matrices to their owners."""
        own = (each for each in bucket if self._rank in each.arrival.spread.of_rank)
        held = {each.arrival.name: list(self._stepped[each.parameter].updates(each.piece)) for each in own}
        return Exchange((each.arrival for each in bucket), held, self._device, rank=self._rank)

    def _send_back(self, bucket: Sequence[Matrix], coming: Exchange) -> Exchange:
        """Orthogonalise what this rank owns, and begin to send it to all that hold parts of it."""
        from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz

        arrived, held = coming.finish(), dict[str, list[Part]]()
        for each in (each for each in bucket if each.owner == self._rank):
            options = [self._stepped[each.parameter].group[name] for name in ("ns_coefficients", "ns_steps", "eps")]
            update = newton_schulz(arrived.pop(each.arrival.key), *options)
            held[each.arrival.key] = [Part(name="", box=each.arrival.box, data=update, dtype=SENT_DTYPE)]
        returns = (arrival for each in bucket for arrival in each.returns(self._rank))
        return Exchange(returns, held, self._device, rank=self._rank)

    def _apply(self, bucket: Sequence[Matrix], going: Exchange) -> None:
        """Step this rank's parts of matrices by the updates that came."""
        arrived = going.finish()
        for each in bucket:
            spread = each.arrival.spread
            own = spread.of_rank.get(self._rank, ())
            updates = {spread[i][0]: arrived.pop(f"{each.arrival.key} {i}") for i in own}
            if updates:
                self._stepped[each.parameter].apply(each.piece, updates)


# ---- by a Trainer's arguments: `optim` "muon", and the options in `optim_args` ----

MUON = "muon"
"""The name in `TrainingArguments.optim`, which that class itself does not know (transformers 5.23): a recipe's parser
takes it, and `arguments.optim = "muon"` sets it."""

_BY_ARGUMENTS = ("model", "betas", "adamw_eps", "weight_decay")
"""Parameters of Muon that other arguments of a Trainer give, or that are none of its options."""


def wants_muon(arguments: Any) -> bool:
    """Whether a Trainer's arguments ask for Muon."""
    return str(getattr(arguments.optim, "value", arguments.optim)) == MUON


def muon_options(arguments: Any) -> dict[str, Any]:
    """The options of Muon of a Trainer's arguments: learning rate, weight decay and AdamW's betas and epsilon are
    theirs, and `optim_args` ("momentum=0.9,adamw_lr=1e-4") has the others.

    Raises:
        ConfigError: an option is unknown, or has no value that can be read.
    """
    options: dict[str, Any] = {
        "lr": arguments.learning_rate,
        "weight_decay": arguments.weight_decay,
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "adamw_eps": arguments.adam_epsilon,
    }
    known = [name for name in signature(Muon).parameters if name not in _BY_ARGUMENTS]
    for word in filter(None, (arguments.optim_args or "").replace(" ", "").split(",")):
        name, equals, text = word.partition("=")
        if name not in known:
            raise ConfigError(f"optim_args: {name!r} is no option of Muon{did_you_mean(name, known)}")
        try:
            value = yaml.safe_load(text)
            options[name] = float(value) if isinstance(value, str) and name != "adjust_lr_fn" else value
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"optim_args: {word!r} cannot be read: {first_line(error)}.") from error
        if not equals or value is None:
            raise ConfigError(f"optim_args: {word!r} has no value: write {name}=VALUE.")
    return options


def make_muon(model: nn.Module, arguments: Any, *, is_fsdp2: bool = True) -> Muon:
    """Muon of a Trainer's model and arguments."""
    if not is_fsdp2:
        raise ConfigError("optim 'muon' needs fsdp_version 2: version 1 of FSDP has flat parameters, and no matrices.")
    return Muon(model, **muon_options(arguments))
