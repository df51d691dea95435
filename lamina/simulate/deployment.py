"""Describes what to simulate: a model on one or two pools, with the runtime's settings."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from lamina.errors import ConfigError
from lamina.plan.cost import CostModel, Fits
from lamina.plan.hardware import Hardware
from lamina.plan.models import ModelShape
from lamina.plan.prices import Prices
from lamina.plan.store import ProfileStore
from lamina.types import Balance, Pipelining


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A model on ``compute_workers`` devices and, if the system has a second pool, ``memory_workers`` more.

    Attributes:
        compute, memory: hardware of each pool's workers.
        local: KV lies beside the weights, as with ``--memory local``: no memory workers, and one copy of the weights.
        tensor_parallel: devices that together hold one copy of the weights.
        lanes, pipelining, slo_tbt_ms, max_num_seqs, max_num_batched_tokens: as in ``lamina.config.EngineConfig``; the
            last two mean the same for every system: sequences that a copy of the weights decodes at once, rows of a
            step.
        kv_tokens_per_worker, prefix_cache, balance: as in ``EngineConfig``; the first and the last have no meaning for
            other systems.
        victim: the policy, of ``lamina.placement.recovery``, that names the request whose KV is dropped when a memory
            worker runs out of slots.
        profile: measured fits, which replace the package's for the kinds that it has.
        prices: the market in which it is paid; None leaves out what it costs.
    """

    model: ModelShape
    compute: Hardware
    compute_workers: int
    memory: Hardware | None = None
    memory_workers: int = 0
    local: bool = False
    tensor_parallel: int = 1
    lanes: int | None = None
    pipelining: Pipelining = "auto"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    slo_tbt_ms: int | None = None
    kv_tokens_per_worker: int | None = None
    prefix_cache: bool = True
    balance: Balance = "off"
    victim: str = "latest"
    profile: ProfileStore | None = None
    prices: Prices | None = None

    def __post_init__(self) -> None:
        for name in ("compute_workers", "tensor_parallel", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.kv_tokens_per_worker is not None and self.kv_tokens_per_worker < 1:
            raise ConfigError(f"kv_tokens_per_worker is {self.kv_tokens_per_worker}; give at least 1")
        if self.local and (self.memory is not None or self.compute_workers != self.tensor_parallel):
            raise ConfigError(
                f"local memory works with one copy of the weights and without memory workers; {self.compute_workers} "
                f"compute workers are {self.replicas} copies of {self.tensor_parallel}. Give memory workers, or "
                f"{self.tensor_parallel} compute workers"
            )
        if self.compute_workers % self.tensor_parallel:
            raise ConfigError(
                f"{self.compute_workers} compute workers do not divide into groups of {self.tensor_parallel}; give a "
                "multiple or another degree of tensor parallelism"
            )
        if self.model.kv_heads % self.tensor_parallel:
            raise ConfigError(
                f"tensor parallelism of {self.tensor_parallel} does not divide the {self.model.kv_heads} key/value "
                f"heads of {self.model.name}; give a degree that does"
            )

    @property
    def replicas(self) -> int:
        """Copies of the weights in the compute pool."""
        return self.compute_workers // self.tensor_parallel

    @cached_property
    def compute_cost(self) -> CostModel:
        """The cost model of one compute worker."""
        return _cost_model(self.model, self.compute, self.profile)

    @cached_property
    def memory_cost(self) -> CostModel:
        """The cost model of one memory worker. Raises ConfigError without a memory pool."""
        if self.memory is None or self.memory_workers < 1:
            raise ConfigError("this system has two pools; give --memory KIND:COUNT too")
        return _cost_model(self.model, self.memory, self.profile)

    @property
    def memories(self) -> int:
        """Places that hold KV in Lamina: memory workers, or the compute workers' own memory."""
        return 1 if self.local else self.memory_workers

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV of each."""
        if not self.local:
            return self.memory_cost.kv_tokens
        free = self.tensor_parallel * self.compute_cost.usable_bytes - self.model.weight_bytes
        return int(free / self.model.kv_bytes_per_token)

    @property
    def usd_per_hour(self) -> float | None:
        """Cost of both pools and of the network between them, in the market of ``prices``; None without one."""
        if self.prices is None:
            return None
        compute = self.prices.usd_per_hour(self.compute, networked=self.memory is not None) * self.compute_workers
        if self.memory is None:
            return compute
        return compute + self.prices.usd_per_hour(self.memory, networked=True) * self.memory_workers

    def require_weights(self, cost: CostModel) -> None:
        """Raise ConfigError if a copy of the weights does not fit its tensor-parallel group."""
        tp = self.tensor_parallel
        if not cost.weights_fit(tp):
            degrees = (2**power for power in range(1, self.model.kv_heads.bit_length()))
            fits = next((n for n in degrees if self.model.kv_heads % n == 0 and cost.weights_fit(n)), None)
            remedy = (
                f"give --tensor-parallel {fits} with a multiple of {fits} workers" if fits else "give other hardware"
            )
            raise ConfigError(
                f"{self.model.name} has {self.model.weight_bytes / 1e9:.0f} GB of weights; {tp} {cost.hardware.kind} "
                f"hold {tp * cost.usable_bytes / 1e9:.0f} GB; {remedy}"
            )


@lru_cache(maxsize=32)
def _cost_model(shape: ModelShape, hardware: Hardware, profile: ProfileStore | None) -> CostModel:
    """One object for all deployments of a model on a kind, so that what is tabulated of it is tabulated once."""
    return CostModel(shape, hardware, Fits.load(hardware, profile))
