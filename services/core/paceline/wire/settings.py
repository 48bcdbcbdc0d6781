"""The configuration's schema (docs/configuration.md); layers and their order are in `wire.config`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Address = Annotated[str, Field(pattern=r"^$|^\S+:[0-9]{1,5}$")]
"""Empty, or ``host:port``."""
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]

MAX_DRAFT_TOKENS = 16


def _null_is_a_name(value: Any) -> Any:
    """YAML reads the unquoted name ``null`` as nothing."""
    return "null" if value is None else value


EngineName = Annotated[Literal["torch", "vllm", "null", "timed"], BeforeValidator(_null_is_a_name)]
DrafterKind = Annotated[
    Literal["model", "ngram", "suffix", "null", "timed"], BeforeValidator(_null_is_a_name)
]


class Section(BaseModel):
    """Unknown keys and wrong types are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSettings(Section):
    target: str = "smollm2-135m-instruct"
    """Local path, hub id, or the name of a bundled model."""
    name: str = ""
    """Name the API serves it under; empty is the last part of ``target``."""

    @property
    def served_name(self) -> str:
        return self.name or self.target.rstrip("/").rsplit("/", 1)[-1]


class EngineSettings(Section):
    """Of every verifier; entries of ``verifiers`` override single keys."""

    engine: EngineName = "torch"
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Empty: bfloat16, or float32 with ``exact``."""
    device: str = "auto"
    threads: Annotated[int, Field(ge=0)] = 0
    """torch threads; 0 is one for each core."""
    exact: bool = False
    """One seed, the same bytes: fp32, or with a 16-bit ``dtype`` passes of one shape (slower)."""
    compile: bool = False
    max_sequences: Count = 64
    max_step_tokens: Annotated[int, Field(ge=32)] = 512
    kv_cache_tokens: Annotated[int, Field(ge=0)] = 0
    """0 sizes the cache from ``max_sequences`` and the memory at hand."""
    prefix_cache: bool = True
    integrity_check: bool = False
    slowdown: Annotated[float, Field(ge=1)] = 1.0

    @property
    def effective_dtype(self) -> str:
        return self.dtype or ("float32" if self.exact else "bfloat16")


class Listen(Section):
    """Where a worker listens when it is started here, and where others reach it."""

    addr: Address = ""
    """``host:port`` of a running worker: connect, do not start. ``serve`` listens on its port."""
    host: str = "127.0.0.1"
    """Interface that ``serve`` listens on."""
    port: Port | None = None
    admin_port: Port | None = None


class VerifierSettings(EngineSettings, Listen):
    id: Identifier = "v0"


class DrafterSettings(Listen):
    id: Identifier = "d0"
    kind: DrafterKind = "ngram"
    path: str = ""
    """Draft model of kind ``model``: path or hub id."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str = "auto"
    threads: Annotated[int, Field(ge=0)] = 0
    slowdown: Annotated[float, Field(ge=1)] = 1.0
    max_sessions: Count = 1024

    @model_validator(mode="after")
    def _model_has_path(self) -> DrafterSettings:
        if self.kind == "model" and not self.path and not self.addr:
            raise ValueError("path: kind 'model' needs the draft model's path")
        return self


class SpeculationSettings(Section):
    enabled: bool = True
    k: Literal["auto"] | Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] = "auto"
    k_max: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)] = 8
    mode: Literal["coupled", "rejection"] = "coupled"
    draft_ahead: bool = False
    wait: Literal["auto", "always", "never"] = "auto"


class ControlSettings(Section):
    kind: Literal["paceline", "off", "fixed", "threshold", "smartspec", "schedule", "adaspec"] = "paceline"
    arg: float | None = None


class QueueSettings(Section):
    url: str = ""
    """Redis or Valkey URL; empty starts an embedded server."""
    max_requests: Count = 1024
    max_tokens: Count = 1_048_576
    lease_s: Positive = 10.0


class GatewaySettings(Section):
    host: str = "127.0.0.1"
    port: Port = 8000
    grpc_port: Port | None = None
    """Default 8001 with port 8000, else a free one."""
    admin_port: Port | None = None
    """Default 9000 with port 8000, else a free one."""
    grace_s: NonNegative = 30.0
    stall_timeout_s: Positive = 30.0
    """A reader that takes nothing for this long is cut."""
    queue_timeout_s: Positive = 60.0
    max_body_bytes: Count = 4 * 1024 * 1024
    max_n: Count = 8


class PolicySettings(Listen):
    pass


class ClassSettings(Section):
    name: Identifier
    ttft_ms: NonNegative = 0.0
    tpot_ms: NonNegative = 0.0
    priority: int = 0
    """Lower is served first."""
    reserved_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    shed_order: int = 0


class TenantSettings(Section):
    file: str = ""


class TlsSettings(Section):
    cert: str = ""
    key: str = ""
    ca: str = ""


class SuperviseSettings(Section):
    restart: bool = True


class TimedSettings(Section):
    verify_ms: NonNegative = 20.0
    verify_token_ms: NonNegative = 0.0
    draft_ms: NonNegative = 2.0
    """For each draft token."""
    rtt_ms: NonNegative = 0.0


class TestingSettings(Section):
    """Values other than the defaults are refused unless PACELINE_TESTING=1."""

    synthetic_acceptance: Annotated[float, Field(ge=0, le=1)] | None = None
    timed: TimedSettings = TimedSettings()


class Settings(Section):
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    verifiers: tuple[VerifierSettings, ...] = (VerifierSettings(),)
    drafters: tuple[DrafterSettings, ...] = (DrafterSettings(),)
    speculation: SpeculationSettings = SpeculationSettings()
    control: ControlSettings = ControlSettings()
    queue: QueueSettings = QueueSettings()
    gateway: GatewaySettings = GatewaySettings()
    policy: PolicySettings = PolicySettings()
    classes: tuple[ClassSettings, ...] = (ClassSettings(name="default"),)
    tenants: TenantSettings = TenantSettings()
    tls: TlsSettings = TlsSettings()
    supervise: SuperviseSettings = SuperviseSettings()
    testing: TestingSettings = TestingSettings()

    def verifier(self, worker_id: str) -> VerifierSettings:
        return next(v for v in self.verifiers if v.id == worker_id)

    def drafter(self, worker_id: str) -> DrafterSettings:
        return next(d for d in self.drafters if d.id == worker_id)
