"""Where the ranks of one machine meet: a store on the loopback, served by the launcher.

The launcher hosts the store, so no port is looked up, let go and hoped to be still free when rank 0 binds it. Each
attempt gets a new store on a new port: a restarted rank cannot dial the address that a dead one left behind.
"""

from datetime import timedelta

from torch.distributed import DistError, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from drumline.launch.detect import LaunchError

LOOPBACK = "127.0.0.1"


class LocalRendezvous(RendezvousHandler):
    """The rendezvous of an elastic agent that is alone.

    Args:
        port: of the store; 0 takes a free one.
        timeout_s: longest that a rank may wait for another, seconds.
    """

    def __init__(self, port: int, timeout_s: float):
        self._port = port
        self._timeout = timedelta(seconds=timeout_s)
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """Ranks meet through the launcher's store."""
        return True

    def get_backend(self) -> str:
        """The name of this kind of rendezvous."""
        return "drumline-local"

    def next_rendezvous(self) -> RendezvousInfo:
        """Opens the store of the next attempt.

        Returns:
            The store and its address.

        Raises:
            LaunchError: the port is in use or may not be used.
        """
        # A fixed port cannot be bound again while the old store lives, so that one is kept; ranks prefix their keys by
        # attempt.
        if self._store is None or self._port == 0:
            self._store = self._open()
        store = PrefixStore("agent", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def is_closed(self) -> bool:
        """Never: it ends with the launcher."""
        return False

    def set_closed(self) -> None:
        """Nothing to close for others."""

    def num_nodes_waiting(self) -> int:
        """No other node takes part."""
        return 0

    def get_run_id(self) -> str:
        """The run's id among agents."""
        return "local"

    def shutdown(self) -> bool:
        """Lets go of the store."""
        self._store = None
        return True

    def _open(self) -> TCPStore:
        try:
            return TCPStore(LOOPBACK, self._port, is_master=True, wait_for_workers=False, timeout=self._timeout)
        except (DistError, RuntimeError, OverflowError, ValueError, TypeError) as error:
            reason = "is in use" if "EADDRINUSE" in str(error) else f"cannot be used ({str(error).splitlines()[0]})"
            raise LaunchError(
                f"port {self._port} on {LOOPBACK} {reason}; leave the port out and a free one is taken"
            ) from error
