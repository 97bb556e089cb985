"""Servers and workers as Ray actors; the only file that imports Ray."""

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybatch.core import PlanError, RankError
from anybatch.parallel.worker import Worker

_LOCAL = "127.0.0.1"


class Ended(Exception):  # noqa: N818
    """The called process has ended."""


class Lost(RankError):  # noqa: N818
    """A value is lost with the machine that held it."""

    def __init__(self, said: str) -> None:
        super().__init__(
            f"Expected a cluster that keeps what it is given, got a value that is gone ({said}). No update "
            "was made. Go on from the last checkpoint."
        )


class RayCluster:
    """Processes that the driver calls; values stay where they are made, and references are passed on.

    They are actors on this machine, or on an existing Ray cluster at `address`; each worker has `gpus` GPUs.

    On this machine Ray runs without dashboard and usage statistics, with a token, until `close`. On an
    existing cluster `close` ends only the actors. Ray 2.60 listens on all interfaces of a machine, even if
    given 127.0.0.1: everyone with the token can run code.
    """

    def __init__(self, address: str | None = None, gpus: int = 0) -> None:
        try:
            ray: Any = import_module("ray")
        except ImportError as error:
            raise PlanError(
                f"Expected Ray for a ParameterServer, got none ({error}). Install it: pip install "
                '"anybatch[server]".'
            ) from None
        if ray.is_initialized() and not any(one.address == address for one in _OPEN):
            raise PlanError(
                f"Expected Ray not to be in use here, got {ray.get_runtime_context().gcs_address}. Call "
                "ray.shutdown() first, or stop the other ParameterServer."
            )
        self.address = address
        if not _OPEN:
            _SET.update({name: value for name, value in _ENVIRONMENT.items() if name not in os.environ})
            os.environ.update(_SET)
        _make_token_private(is_local=address is None)
        self._ray = ray
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if address is None:
            cpus = max(4, os.cpu_count() or 1)
            options |= {"include_dashboard": False, "_node_ip_address": _LOCAL, "num_cpus": cpus}
        try:
            if not ray.is_initialized():  # by the ParameterServer of another step
                if address is not None:
                    _reach(address)
                ray.init(address=address or "local", **options)
        except (RuntimeError, ValueError, OSError, ray.exceptions.AuthenticationError) as error:
            ray.shutdown()
            _leave_environment()
            raise RankError(
                f"Expected a Ray cluster at {address or _LOCAL}, got none "
                f"({str(error).splitlines()[0][:200]}). "
                "Nothing is left running. Start one with ray start --head, set RAY_AUTH_MODE=token and "
                "RAY_AUTH_TOKEN if it has a token, or leave the address out."
            ) from None
        self._actors: dict[Any, int] = {}  # and their GPUs
        self._gpus = gpus
        _OPEN.append(self)

    def put(self, value: Any) -> Any:
        """Store a value; return a reference. Raise PlanError if it cannot be pickled."""
        try:
            return self._ray.put(value)
        except Exception as error:
            said = str(error.__cause__ or error).splitlines()[0].split(". ")[0][:200].rstrip(".")
            raise PlanError(
                f"Expected a model, a loss and optimizers that can be pickled, got an error: {said}. Leave "
                "out locks, open files and parametrizations, such as weight_norm."
            ) from None

    def start(self, kind: type, *args: Any) -> Any:
        """Start an actor; raise PlanError if it needs a GPU and none is free: Ray would wait for ever."""
        gpus = self._gpus if issubclass(kind, Worker) else 0
        needed = sum(self._actors.values()) + gpus
        if gpus and needed > (there := self._ray.cluster_resources().get("GPU", 0)):
            raise PlanError(
                f"Expected a GPU for each worker, got {there:g} for {needed} workers. Ask for fewer workers, "
                'or for workers on the CPU: ParameterServer(device="cpu").'
            )
        options = {"num_cpus": 0, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0}
        actor = self._ray.remote(kind).options(**options).remote(*args)
        self._actors[actor] = gpus
        return actor

    def call(self, process: Any, method: str, *args: Any, returns: int = 1) -> list[Any]:
        """Call a method without waiting, in the order of calls; return references to its results."""
        serialization = self._ray.util
        # Only for rows: pickle preserves memory shared between a model's buffers.
        serialization.register_serializer(Tensor, serializer=_to_bytes, deserializer=_from_bytes)
        try:
            found = getattr(process, method).options(num_returns=returns).remote(*args)
        finally:
            serialization.deregister_serializer(Tensor)
        return found if returns > 1 else [found]

    def wait(self, references: Sequence[Any], seconds: float | None = None) -> Any:
        """Return the first reference that is finished or failed; None after so many seconds."""
        ready, _ = self._ray.wait([*references], num_returns=1, timeout=seconds, fetch_local=False)
        return ready[0] if ready else None

    def clock(self) -> float:
        """Return seconds."""
        return time.monotonic()

    def get(self, reference: Any) -> Any:
        """Return the value of a reference. Raise the call's error, `Ended` or `Lost`."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:  # first: it may be an ActorError as well, if its cause is one
            cause = error.cause
            if isinstance(cause, errors.RayError):
                raise Lost(_last_line(cause)) from None
            raise cause from None
        except errors.RayActorError as error:
            raise Ended(_last_line(error)) from None
        except errors.RayError as error:
            raise Lost(_last_line(error)) from None

    def kill(self, process: Any) -> None:
        """End an actor."""
        self._ray.kill(process)
        self._actors.pop(process, None)

    def close(self) -> None:
        """End all actors, and shut Ray down if no other cluster uses it in this process."""
        for actor in [*self._actors]:
            self.kill(actor)
        _OPEN.remove(self)
        if not _OPEN:
            self._ray.shutdown()
            _leave_environment()


_OPEN: list[RayCluster] = []  # in this process
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # `get` raises errors of a unit once
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_SET: dict[str, str] = {}  # variables that we set


def _leave_environment() -> None:
    for name, value in _SET.items() if not _OPEN else ():
        if os.environ.get(name) == value:
            del os.environ[name]
    _SET.clear()


def _make_token_private(*, is_local: bool) -> None:
    """Restrict Ray's token to this user; create one for this machine, as others can read Ray's own."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if os.environ.get("RAY_AUTH_TOKEN") or not (is_local or path.exists()):
        return
    with suppress(OSError):  # a file of another user, or no permission to write
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
            path.chmod(0o600)
            if not file.read().strip():
                file.write(secrets.token_hex(32))


def _to_bytes(value: Tensor) -> tuple[Any, ...]:
    """Return a tensor as the arrays that Ray sends; pickling by torch is ten times slower."""
    if value.layout is not torch.strided or value.is_quantized:
        saved = BytesIO()
        torch.save(value, saved)
        return (saved.getvalue(),)
    flat = value.detach().cpu().reshape(-1).view(torch.uint8)
    return flat.numpy(), value.shape, value.dtype


def _from_bytes(sent: tuple[Any, ...]) -> Tensor:
    """Return a tensor in its own memory: Ray's is read-only, and a forward may write to its input."""
    if len(sent) == 1:
        return torch.load(BytesIO(sent[0]), weights_only=True)
    flat, shape, dtype = sent
    value = torch.empty(shape, dtype=dtype)
    value.view(-1).view(torch.uint8).numpy()[...] = flat
    return value


def _last_line(error: BaseException) -> str:
    """Return the last line of an error: the first ones tell where it came from."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()[:300]


def _reach(address: str) -> None:
    """Check the address first: Ray retries for minutes if no gRPC server answers."""
    import socket

    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"expected host:port, got {address!r}")
    with socket.create_connection((host, int(port)), timeout=5) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        if peer.recv(4)[3:] != b"\4":  # HTTP/2 begins with settings
            raise ConnectionError("something else listens there")
