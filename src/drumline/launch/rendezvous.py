"""Where the ranks of one machine meet: a store on the loopback, served by the launcher.

The launcher hosts the store, so no port is looked up, let go and hoped to be still free when rank 0 binds it. Each
attempt gets a new store: a restarted rank cannot dial the address that a dead one left behind.

The port is there before the ranks, the store only after them. A store has a thread, and a rank that is forked while
that thread holds a lock waits for ever once it needs the same lock (six of 400 launches of four ranks did).
"""

import errno
import socket
from datetime import timedelta

from torch.distributed import DistError, HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
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
        self._listener: socket.socket | None = None
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """Ranks meet through the launcher's store."""
        return True

    def get_backend(self) -> str:
        """The name of this kind of rendezvous."""
        return "drumline-local"

    def next_rendezvous(self) -> RendezvousInfo:
        """Takes the port of the next attempt. Ranks may dial it at once; `serve` answers them.

        Returns:
            The address, and a store for the agent itself, which has no other agent to talk to.

        Raises:
            LaunchError: the port is in use or may not be used.
        """
        self.shutdown()
        self._listener = self._listen()
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, self._listener.getsockname()[1]))

    def serve(self) -> None:
        """Opens the store at the port that was taken. To be called once the ranks have been started.

        Raises:
            LaunchError: torch would not open it.
        """
        assert self._listener is not None, "a port is taken before it is served"
        port = self._listener.getsockname()[1]
        try:
            # The store closes the descriptor that it is given, so that Python's object must let go of it.
            self._store = TCPStore(
                LOOPBACK,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=self._timeout,
                master_listen_fd=self._listener.detach(),
            )
        except (DistError, RuntimeError, ValueError) as error:
            raise LaunchError(f"no store at port {port} on {LOOPBACK}: {str(error).splitlines()[0]}") from error
        finally:
            self._listener = None

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
        """Lets go of the store and its port."""
        if self._listener is not None:
            self._listener.close()
        self._listener = self._store = None
        return True

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            # What ended ranks left of the last attempt's connections must not keep its port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((LOOPBACK, self._port))
            listener.listen(socket.SOMAXCONN)
        except (OSError, OverflowError, TypeError) as error:
            listener.close()
            is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            reason = "is in use" if is_taken else f"cannot be used ({error})"
            raise LaunchError(
                f"port {self._port} on {LOOPBACK} {reason}; leave the port out and a free one is taken"
            ) from error
        return listener
