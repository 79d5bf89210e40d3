"""The end that does as the initiator says.

>>> status = serve(channel, Fabric(provider="tcp"))         # one run: 0 if it was measured and every page was right
"""

from __future__ import annotations

import contextlib

import msgspec

from ..errors import FabricError, ProtocolError
from .channel import Channel
from .decode_end import DecodeEnd
from .initiator import SETUP_S, explain, open_side
from .opened import remove_shm_names
from .phases import PhaseRun
from .side import Side
from .wire import Bye, Go, MessengerSetup, Opened, Phase, Ready, Setup
from .workload import Fabric

__all__ = ["combine", "serve"]

# Between phases the initiator may measure something else for a while. Whether it lives is noticed by the connection.
_IDLE_S = 600.0


def serve(channel: Channel, own: Fabric | None) -> int | None:
    """Take part in one run.

    Parameters
    ----------
    channel : Channel
        To the initiator, after the exchange of Hellos.
    own : Fabric, optional
        What was said on this end's command line; None: all as the initiator says.

    Returns
    -------
    int, optional
        Wrong pages in all, at all ends; None if nobody looked.

    Raises
    ------
    FabricKVError
        If it ended early; the initiator has been told, if it still listens.
    """
    with contextlib.ExitStack() as stack:
        peers: list[Opened] = []  # whose files in /dev/shm we remove, should they be killed
        try:
            setup = channel.expect(msgspec.Struct, SETUP_S)
            if not isinstance(setup, Setup | MessengerSetup):
                raise ProtocolError(f"{channel.who} sent {type(setup).__name__} where a setup was due")
            fabric = setup.fabric if own is None else combine(own, setup.fabric)
            if isinstance(setup, MessengerSetup):
                decode = DecodeEnd(stack, channel, setup, fabric, peers)
                return decode.obey()
            side = open_side(stack, fabric, setup.workload, [channel], setup.index, setup.num_targets)
            link = side.link(channel, setup.index)
            opened = channel.expect(Opened, SETUP_S)
            side.connect(link, opened)
            peers.append(opened)
            channel.send(side.opened(link))
            return _obey(side, channel)
        except BaseException as error:
            channel.abort(explain(error))
            stack.close()
            for peer in peers:
                remove_shm_names(peer.shm_names)
            raise


def _obey(side: Side, channel: Channel) -> int | None:
    while True:
        message = _next(channel)
        if isinstance(message, Bye):
            return message.wrong_pages
        run = PhaseRun(side, message)
        channel.send(Ready(*run.tokens(0)))
        channel.expect(Go, SETUP_S + side.workload.timeout_s)
        run.drive([(message.token, message.done_token)])
        channel.send(run.finish())


def _next(channel: Channel) -> Phase | Bye:
    message = channel.expect(msgspec.Struct, _IDLE_S)
    if not isinstance(message, Phase | Bye):
        raise ProtocolError(f"{channel.who} sent {type(message).__name__} where a phase was due")
    return message


def combine(own: Fabric, asked: Fabric) -> Fabric:
    """What this end opens, where the initiator has its wishes too.

    Raises
    ------
    FabricError
        If they name different providers.
    """
    if own.provider is not None and asked.provider is not None and own.provider != asked.provider:
        raise FabricError(
            f"the initiator asks for --provider {asked.provider}, and this target was started with --provider "
            f"{own.provider}",
            op="open",
            provider=own.provider,
        )
    rails = own.rails if own.rails is not None or own.nics else asked.rails
    return msgspec.structs.replace(own, provider=own.provider or asked.provider, rails=rails, mem=own.mem or asked.mem)
