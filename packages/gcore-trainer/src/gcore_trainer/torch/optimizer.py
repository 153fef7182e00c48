"""AdamW and Muon with float32 master copies of parameters of fewer bits; states in host memory or in 8 bits."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from gcore_trainer.config import OptimizerConfig, require
from gcore_trainer.errors import ConfigError, make_extra_error
from gcore_trainer.torch.host_memory import OffloadArena, first_row, local, piece_bytes

BLOCK = 256
"""Values of a quantised moment that share a scale: fixed in the kernels of bitsandbytes."""
_SMALLEST = 4096
"""Values from which a parameter has 8-bit moments, as by default in bitsandbytes: norms and biases do not."""
_PIECE = 1 << 26
"""Most values in one call: the kernels count values in 32 bits, and make float32 copies on CPU."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
Read = Callable[[torch.Tensor], torch.Tensor]
"""Returns an alias of a tensor that can be read, also while the tensor is asleep."""
_MUON_MOMENTUM = 0.95
"""Decay of Muon's moment."""


def _without_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or an alias of a parameter."""
    return tensor.detach() if tensor.requires_grad else tensor


class AdamW:
    """torch's fused AdamW, which updates float32 copies (masters) of parameters of fewer bits and rounds them.

    An update may be far below the resolution of bfloat16 (2^-8 of the parameter): masters sum such updates up.
    Gradients of all micro-batches are added in float32, too, by autograd (`torch.Tensor.grad_dtype`). On ranks FSDP
    adds up in float32, and rounds the sum to the parameter's type each time that ranks exchange gradients: once an
    update or in every micro-batch (`ParallelConfig.gradient_sync`). A trained bfloat16 parameter takes, of this rank's
    shards,

    - without offload 18 bytes on the device: the parameter (2), its gradient (4), master (4) and moments (8);
    - with offload 6 on the device, parameter and gradient, and 16 in host memory, where the gradient is copied to.

    A gradient in bfloat16 exists for one parameter at a time, on ranks for one layer. Parameters of float32 are their
    own masters: they take 16 bytes, with offload 8 and 16. Frozen parameters take their own bytes alone. Gradients and
    moments exist from the start, so that a checkpoint can be loaded into them.

    With offload the fused kernel runs on the CPU: gradients go out (4 bytes a parameter) and parameters come back (2):
    6 bytes over PCIe, where masters and moments that visit the device are 24. The kernel reads and writes 28 bytes of
    host memory a parameter.

    Args:
        parameters: those that are trained, by name.
        offload: whether masters and moments are in (pinned) host memory.
    """

    is_offloaded = False
    """Whether its states are in host memory."""
    computes_moments = False
    """Whether `tensors` computes moments of what is stored."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        config: OptimizerConfig,
        *,
        offload: bool = False,
    ) -> None:
        self.parameters = dict(parameters)
        self.is_offloaded = offload
        self.num_updates = 0
        """Updates that the moments have seen."""
        self._grad_clip = config.grad_clip
        self._masters = {name: _master(p, is_copy=offload) for name, p in parameters.items()}
        for master in self._masters.values():
            master.grad = torch.zeros_like(master)
        self._optimizer = torch.optim.AdamW(
            [{"params": self._with_exact_moments()}],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for master in self._optimizer.param_groups[0]["params"]:
            moments = {key: torch.zeros_like(master) for key in _MOMENTS}
            # The fused kernel reads the count on the parameter's device.
            moments["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            self._optimizer.state[master] = moments
        if offload:
            self._move_to_host(next(iter(parameters.values())).device)
        for parameter, master in self._pairs():
            parameter.grad_dtype = torch.float32
            if not offload:
                # Both are on one device, and share the gradient.
                parameter.grad = master.grad
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)

    def _with_exact_moments(self) -> list[torch.nn.Parameter]:
        """Return the masters whose moments are of their own data type: all."""
        return list(self._masters.values())

    def zero_grad(self) -> None:
        """Set the gradients to 0, in place."""
        _foreach("zero_", [p.grad for p in self.parameters.values() if p.grad is not None])

    def update(self, lr: float) -> float:
        """Clip the gradient and update if its norm is finite; return the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self._grad_clip)
        grad_norm = gather_full_tensor(norm).item()
        if np.isfinite(grad_norm):
            self._step(lr)
        return grad_norm

    @torch.no_grad()
    def _step(self, lr: float) -> None:
        if self.is_offloaded:
            for parameter, master in self._pairs():
                _gradient(master).copy_(_gradient(parameter), non_blocking=True)
            device = next(iter(self.parameters.values())).device
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._update_masters(lr)
        self._round()

    def _update_masters(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.num_updates += 1

    def tensors(self, read: Read = _without_gradient) -> dict[str, dict[str, Any]]:
        """Return ``model``, ``exp_avg`` and ``exp_avg_sq`` as in `BaseTrainer.state`, each tensor by ``read``."""
        groups: dict[str, dict[str, Any]] = {"model": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for name, master in self._masters.items():
            groups["model"][name] = read(master)
            for key in _MOMENTS:
                groups[key][name] = read(self._moment(name, key))
        return groups

    def _moment(self, name: str, key: str) -> torch.Tensor:
        """Return a parameter's moment."""
        return self._optimizer.state[self._masters[name]][key]

    stored_tensors = tensors
    """Return the tensors that stay in memory between updates, by groups and names."""

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Take over the tensors of a state that was checked, and its ``optimizer_step``."""
        self.num_updates = int(state["optimizer_step"])
        for group, tensors in self.tensors().items():
            for name, tensor in tensors.items():
                tensor.copy_(state[group][name])
        for moments in self._optimizer.state.values():
            moments["step"].fill_(float(self.num_updates))
        self._round()

    def _pairs(self) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """Return the parameters that are not their own masters, each with its master."""
        return [
            (p, self._masters[name])
            for name, p in self.parameters.items()
            if p is not self._masters[name]
        ]

    @torch.no_grad()
    def _round(self) -> None:
        pairs = self._pairs()
        if not self.is_offloaded and pairs:
            _foreach(
                "copy_",
                [local(parameter) for parameter, _ in pairs],
                [local(master) for _, master in pairs],
            )
            return
        for parameter, master in pairs:
            target = local(parameter)
            source = local(master)
            if source.dtype != target.dtype:
                # In the memory of the gradient, which is pinned, and of which half is enough.
                pinned = (
                    _gradient(master).view(-1).view(target.dtype)[: target.numel()].view_as(target)
                )
                source = pinned.copy_(source)
            target.copy_(source, non_blocking=True)

    @torch.no_grad()
    def _move_to_host(self, device: torch.device) -> None:
        """Move masters, moments and the masters' gradients into one block of host memory."""
        masters = self._masters.values()
        states = list(map(local, masters))
        for group, tensors in self.stored_tensors().items():
            # The model's are views of the masters.
            if group != "model":
                states += map(local, tensors.values())
        states += map(_gradient, masters)
        arena = OffloadArena(sum(piece_bytes(state.nbytes) for state in states), device)
        for state in states:
            piece = arena.take(state.shape, state.dtype)
            piece.copy_(state)
            state.set_(piece.untyped_storage(), piece.storage_offset(), piece.shape, piece.stride())


class AdamW8bit(AdamW):
    """AdamW whose moments are quantised to 8 bits by blocks (Dettmers et al. 2022, arXiv 2110.02861, section 2).

    The update is that of bitsandbytes, in float32; between updates a moment is a byte, and 256 of them share a float32
    scale. Moments take 2 + 8 / 256 bytes a parameter instead of 8: a bfloat16 parameter 12.03 bytes in all instead of
    18, a float32 one 10.03 instead of 16. On ranks, each quantises its own shards. Tensors and shards of fewer than
    4,096 values keep exact moments.

    `tensors` computes float32 moments in host memory, 8 bytes a parameter while they are used. Loaded on ranks with the
    same shards, they give the same bytes, and scales within a float32 rounding error of the saved ones; on others they
    are quantised again. States of plain AdamW load, and the other way round.

    With offload, the update on the CPU makes float32 copies of one parameter's moments at a time.

    Raises:
        ConfigError: a parameter is not float32, bfloat16 or float16.
        TrainerError: bitsandbytes is not installed.
    """

    computes_moments = True

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        config: OptimizerConfig,
        *,
        offload: bool = False,
    ) -> None:
        self._functional = quantised_kernels()
        self._config = config
        self._blocks: dict[str, dict[str, _Blocks]] = {}
        super().__init__(parameters, config, offload=offload)

    def stored_tensors(self) -> dict[str, dict[str, Any]]:
        model: dict[str, torch.Tensor] = {}
        exact: dict[str, torch.Tensor] = {}
        values: dict[str, torch.Tensor] = {}
        scales: dict[str, torch.Tensor] = {}
        for name, master in self._masters.items():
            model[name] = master.detach()
            for key in _MOMENTS:
                if name in self._blocks:
                    blocks = self._blocks[name][key]
                    values[f"{key} {name}"] = blocks.values
                    scales[f"{key} {name}"] = blocks.scales
                else:
                    exact[f"{key} {name}"] = self._moment(name, key)
        return {"model": model, "exact": exact, "values": values, "scales": scales}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        self.num_updates = int(state["optimizer_step"])
        for name, master in self._masters.items():
            master.copy_(state["model"][name])
            for key in _MOMENTS:
                if name in self._blocks:
                    self._blocks[name][key].quantize(local(state[key][name]))
                else:
                    self._moment(name, key).copy_(state[key][name])
        for moments in self._optimizer.state.values():
            moments["step"].fill_(float(self.num_updates))
        self._round()

    def _with_exact_moments(self) -> list[torch.nn.Parameter]:
        exact: list[torch.nn.Parameter] = []
        codes: dict[tuple[torch.device, bool], torch.Tensor] = {}
        for name, master in self._masters.items():
            if master.dtype != torch.float32:
                raise ConfigError(
                    f"name is {self._config.name!r}; expected 'adamw' for parameters of {master.dtype}, as {name} is"
                )
            shard = local(master)
            device = shard.device
            if shard.numel() < _SMALLEST or not shard.is_contiguous():
                exact.append(master)
                continue
            self._blocks[name] = {}
            for key in _MOMENTS:
                is_signed = key == "exp_avg"
                if (device, is_signed) not in codes:
                    code = self._functional.create_dynamic_map(signed=is_signed)
                    codes[device, is_signed] = code.to(device)
                self._blocks[name][key] = _Blocks(self._functional, shard, codes[device, is_signed])
        return exact

    def _update_masters(self, lr: float) -> None:
        super()._update_masters(lr)
        config = self._config
        for name, moments in self._blocks.items():
            master = self._masters[name]
            first = moments["exp_avg"]
            second = moments["exp_avg_sq"]
            weights = local(master).detach().view(-1).split(_PIECE)
            gradients = _gradient(master).detach().view(-1).split(_PIECE)
            pieces = zip(weights, gradients, first.pieces(), second.pieces(), strict=True)
            for weight, gradient, (first_values, first_scales), (
                second_values,
                second_scales,
            ) in pieces:
                self._functional.optimizer_update_8bit_blockwise(
                    "adam",
                    gradient,
                    weight,
                    first_values,
                    second_values,
                    *config.betas,
                    0.0,
                    0.0,
                    config.eps,
                    self.num_updates,
                    lr,
                    first.code,
                    second.code,
                    first_scales,
                    second_scales,
                    config.weight_decay,
                )

    @torch.no_grad()
    def _moment(self, name: str, key: str) -> torch.Tensor:
        """Return a moment in float32: the live tensor if it is exact, else a copy in host memory."""
        if name not in self._blocks:
            return super()._moment(name, key)
        copy = torch.empty_like(self._masters[name].detach(), device="cpu")
        self._blocks[name][key].dequantize(local(copy))
        return copy


class MuonAdamW(AdamW):
    """Muon for the matrices of hidden layers (K. Jordan 2024, arXiv 2502.16982), and AdamW for all else.

    With the gradient G of a matrix [n, m] and its moment M: M <- mu M + (1 - mu) G; the update is the orthogonal factor
    of (1 - mu) G + mu M by Newton-Schulz iterations in bfloat16 (`torch.optim.Muon`), times 0.2 sqrt(max(n, m)), by
    which its entries are about as large as AdamW's. Weight decay is decoupled, and that of ``config``. A matrix takes
    4 bytes a parameter for its moment, where AdamW's two take 8.

    On ranks each holds its rows of matrices and moments. The matrix that is made orthogonal is gathered, one at a time,
    and every rank computes all of it, so that an update does not depend on the number of ranks.

    Args:
        matrices: names of the parameters that Muon updates.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        config: OptimizerConfig,
        *,
        matrices: Collection[str],
    ) -> None:
        self._config = config
        self._matrices = [name for name in parameters if name in matrices]
        super().__init__(parameters, config)
        self._momentum = {
            name: torch.zeros_like(self._masters[name].detach()) for name in self._matrices
        }

    def tensors(self, read: Read = _without_gradient) -> dict[str, dict[str, Any]]:
        """Return ``model``, ``exp_avg`` with Muon's moments among the first ones, and ``exp_avg_sq`` of AdamW's."""
        model: dict[str, torch.Tensor] = {}
        first: dict[str, torch.Tensor] = {}
        second: dict[str, torch.Tensor] = {}
        for name, master in self._masters.items():
            model[name] = read(master)
            if name in self._momentum:
                first[name] = read(self._momentum[name])
            else:
                first[name] = read(self._moment(name, "exp_avg"))
                second[name] = read(self._moment(name, "exp_avg_sq"))
        return {"model": model, "exp_avg": first, "exp_avg_sq": second}

    stored_tensors = tensors

    def _with_exact_moments(self) -> list[torch.nn.Parameter]:
        return [master for name, master in self._masters.items() if name not in self._matrices]

    def _update_masters(self, lr: float) -> None:
        super()._update_masters(lr)
        rate = lr * (self._config.muon_lr or self._config.lr) / self._config.lr
        for name, momentum in self._momentum.items():
            master = self._masters[name]
            assert master.grad is not None
            momentum.lerp_(master.grad, 1 - _MUON_MOMENTUM)
            direction = gather_full_tensor(master.grad.lerp(momentum, _MUON_MOMENTUM))
            update = torch.nn.Parameter(torch.zeros_like(direction))
            update.grad = direction
            torch.optim.Muon(
                [update],
                lr=rate,
                weight_decay=0.0,
                momentum=0.0,
                nesterov=False,
                adjust_lr_fn="match_rms_adamw",
            ).step()
            shard = local(master)
            first = first_row(master)
            shard.mul_(1 - rate * self._config.weight_decay).add_(
                update[first : first + shard.shape[0]]
            )


def make_adamw(
    parameters: Mapping[str, torch.nn.Parameter],
    config: OptimizerConfig,
    *,
    offload: bool,
    model: Any = None,
) -> AdamW:
    """Make the optimizer that ``config.name`` names, with masters; Muon needs transformers' model.

    Errors are those of its class.
    """
    if config.name == "muon":
        require("name", config.name, model is not None, "'adamw' or 'adamw_8bit' for this model")
        require(
            "name",
            config.name,
            not offload,
            "'adamw' or 'adamw_8bit' with optimizer states in host memory",
        )
        return MuonAdamW(parameters, config, matrices=hidden_matrices(parameters, model))
    if config.name == "adamw_8bit":
        return AdamW8bit(parameters, config, offload=offload)
    return AdamW(parameters, config, offload=offload)


def gather_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of one that may be sharded; all ranks call it."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def hidden_matrices(parameters: Mapping[str, torch.nn.Parameter], model: Any) -> set[str]:
    """Return the names of the matrices of hidden layers: those outside a model's embeddings and heads."""
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    outer: set[int] = set()
    for module in (*tables, *filter(None, heads)):
        outer.update(map(id, module.parameters()))
    return {name for name, p in parameters.items() if p.ndim == 2 and id(p) not in outer}


class _Blocks:
    """One moment of one parameter's shard: a byte for each value, and a scale for each block of them."""

    def __init__(self, functional: Any, like: torch.Tensor, code: torch.Tensor) -> None:
        self._functional = functional
        self.code = code
        """The 256 numbers, ascending, that bytes stand for, to be multiplied by a scale."""
        self.values = torch.zeros(like.numel(), dtype=torch.uint8, device=like.device)
        self.scales = torch.zeros(
            -(-like.numel() // BLOCK), dtype=torch.float32, device=like.device
        )

    def pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield views of values and scales, each as large as one kernel call may take."""
        return zip(self.values.split(_PIECE), self.scales.split(_PIECE // BLOCK), strict=True)

    def dequantize(self, out: torch.Tensor) -> None:
        """Write the moment to a contiguous float32 tensor."""
        for (values, scales), target in zip(self.pieces(), out.view(-1).split(_PIECE), strict=True):
            target.copy_(
                self._functional.dequantize_blockwise(
                    values, absmax=scales, code=self.code, blocksize=BLOCK
                )
            )

    def quantize(self, moment: torch.Tensor) -> None:
        """Store a float32 moment in 8 bits; a moment that `dequantize` wrote gives the same bytes again.

        A scale is what the largest or the smallest number of the code is multiplied by, and not the largest magnitude,
        as in the kernels: the codes of signed numbers start at -0.993 and end at 1.
        """
        middle = (self.code[1:] + self.code[:-1]) / 2
        for (values, scales), source in zip(
            self.pieces(), moment.reshape(-1).split(_PIECE), strict=True
        ):
            padded = torch.nn.functional.pad(
                source.to(values.device, torch.float32), (0, -source.numel() % BLOCK)
            )
            rows = padded.view(-1, BLOCK)
            largest = rows.amax(1)
            if self.code[0] < 0:
                largest = torch.maximum(largest, rows.amin(1) / self.code[0])
            scales.copy_(largest)
            shares = rows / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
            values.copy_(torch.bucketize(shares, middle, out_int32=True).view(-1)[: values.numel()])


def quantised_kernels() -> Any:
    """Import the kernels of bitsandbytes; raise `TrainerError` if it is not installed."""
    # It looks for a package of kernels for 4-bit weights, which are not used here, and logs that there is none.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.CRITICAL)
    try:
        from bitsandbytes import functional
    except ImportError:
        raise make_extra_error("bitsandbytes", "8bit", "name is 'adamw_8bit'") from None
    return functional


def _master(parameter: torch.nn.Parameter, *, is_copy: bool) -> torch.nn.Parameter:
    if parameter.dtype in (torch.float32, torch.float64) and not is_copy:
        return parameter
    device = torch.device("cpu") if is_copy else parameter.device
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.nn.Parameter(parameter.detach().to(device, dtype, copy=True))


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)


def _foreach(operation: str, *tensors: Sequence[torch.Tensor]) -> None:
    """Apply an operation to the tensors of lists in few kernels; torch's optimizers use these functions as well."""
    getattr(torch, f"_foreach_{operation}")(*tensors)
