"""Regions, addresses and tokens on the wire: the first version's bytes are frozen, hostile ones are refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_kv.errors import ProtocolError
from fabric_kv.regions import CounterToken, EngineAddress, ProcessIdentity, RemoteRegion

EPOCH = bytes(range(16))
REGION = RemoteRegion(EPOCH, 3, 6 << 30, (4 << 30, 6 << 30), (((0, 1), (5, 6)), ((2**64 - 1, 2**63), (7, 8))))
ADDRESS = EngineAddress(EPOCH, ((b"\x02\x00\x1f\x90\x7f\x00\x00\x01" + bytes(8),), (b"fi_shm://42\x00", b"x")))
SEEN = EngineAddress(EPOCH, ((b"x",),), ProcessIdentity(EPOCH, 42, 1 << 40))
TOKEN = CounterToken(131070, 31, 4096, 2)

# Bytes as first released: regions and tokens of version 1, addresses of version 2. A change here breaks every peer of
# another version: raise VERSION instead.
GOLDEN_REGION = bytes.fromhex(
    "464b56520100"
    "95"
    "c410000102030405060708090a0b0c0d0e0f"
    "03"
    "cf0000000180000000"
    "92cf0000000100000000cf0000000180000000"
    "92"
    "92"
    "920001"
    "920506"
    "92"
    "92cfffffffffffffffffcf8000000000000000"
    "920708"
)
GOLDEN_ADDRESS = bytes.fromhex(
    "464b56410200"
    "93"
    "c410000102030405060708090a0b0c0d0e0f"
    "92"
    "91"
    "c41002001f907f0000010000000000000000"
    "92"
    "c40c66695f73686d3a2f2f343200"
    "c40178"
    "c0"
)
GOLDEN_SEEN = bytes.fromhex(
    "464b56410200"
    "93"
    "c410000102030405060708090a0b0c0d0e0f"
    "9191c40178"
    "93"
    "c410000102030405060708090a0b0c0d0e0f"
    "2a"
    "cf0000010000000000"
)

GOLDEN_TOKEN = bytes.fromhex("464b5643010094ce0001fffe1fcd100002")

epochs = st.binary(min_size=16, max_size=16)
u64 = st.integers(0, 2**64 - 1)


@st.composite
def remote_regions(draw: st.DrawFn) -> RemoteRegion:
    ends = sorted(draw(st.sets(st.integers(1, 2**63 - 1), min_size=1, max_size=5)))
    rail = st.tuples(*[st.tuples(u64, u64)] * len(ends))
    rails = draw(st.lists(rail, min_size=1, max_size=64))
    return RemoteRegion(draw(epochs), draw(st.integers(0, 63)), ends[-1], tuple(ends), tuple(rails))


addresses = st.builds(
    EngineAddress,
    epochs,
    st.lists(
        st.lists(st.binary(min_size=1, max_size=64), min_size=1, max_size=8).map(tuple), min_size=1, max_size=8
    ).map(tuple),
    st.none() | st.builds(ProcessIdentity, epochs, st.integers(1, 2**31 - 1), st.integers(0, 2**63 - 1)),
)


tokens = st.builds(
    CounterToken, st.integers(0, 2**17 - 2), st.integers(0, 31), st.integers(1, 2**63 - 1), st.integers(0, 63)
)


def test_golden_bytes_of_a_region() -> None:
    assert REGION.to_bytes() == GOLDEN_REGION
    assert RemoteRegion.from_bytes(GOLDEN_REGION) == REGION


def test_golden_bytes_of_an_address() -> None:
    assert ADDRESS.to_bytes() == GOLDEN_ADDRESS
    assert EngineAddress.from_bytes(GOLDEN_ADDRESS) == ADDRESS
    assert SEEN.to_bytes() == GOLDEN_SEEN
    assert EngineAddress.from_bytes(GOLDEN_SEEN) == SEEN


def test_an_address_of_the_first_version_is_refused() -> None:
    former = EngineAddress.MAGIC + b"\x01\x00" + msgspec.msgpack.encode((EPOCH, ADDRESS.groups))
    with pytest.raises(ProtocolError, match="engine address: the peer speaks version 1, this side speaks 2"):
        EngineAddress.from_bytes(former)


@pytest.mark.parametrize(
    "process",
    [
        (EPOCH[:15], 1, 0),
        (EPOCH, 0, 0),
        (EPOCH, -1, 0),
        (EPOCH, 2**31, 0),
        (EPOCH, 1, -1),
        (EPOCH, 1, 2**63),
        (EPOCH,),
        7,
    ],
)
def test_processes_out_of_range_are_refused(process: object) -> None:
    data = EngineAddress.MAGIC + b"\x02\x00" + msgspec.msgpack.encode((EPOCH, ADDRESS.groups, process))
    with pytest.raises(ProtocolError, match="engine address"):
        EngineAddress.from_bytes(data)


def test_golden_bytes_of_a_token() -> None:
    assert TOKEN.to_bytes() == GOLDEN_TOKEN
    assert CounterToken.from_bytes(GOLDEN_TOKEN) == TOKEN
    assert msgspec.msgpack.encode(TOKEN) == GOLDEN_TOKEN[6:], "as messages carry it"
    assert TOKEN.native() == (131070, 31, 4096)


@given(remote_regions())
def test_regions_survive_the_wire(region: RemoteRegion) -> None:
    data = region.to_bytes()
    assert len(data) <= RemoteRegion.MAX_BYTES
    assert RemoteRegion.from_bytes(data) == region


@given(addresses)
def test_addresses_survive_the_wire(address: EngineAddress) -> None:
    assert EngineAddress.from_bytes(address.to_bytes()) == address


@given(tokens)
def test_tokens_survive_the_wire(token: CounterToken) -> None:
    data = token.to_bytes()
    assert len(data) <= CounterToken.MAX_BYTES
    assert CounterToken.from_bytes(data) == token


def test_the_newer_side_is_named() -> None:
    newer = GOLDEN_REGION[:4] + b"\x02\x00" + GOLDEN_REGION[6:]
    with pytest.raises(ProtocolError, match="remote region: the peer speaks version 2, this side speaks 1"):
        RemoteRegion.from_bytes(newer)
    with pytest.raises(ProtocolError, match="counter token: the peer speaks version 2, this side speaks 1"):
        CounterToken.from_bytes(GOLDEN_TOKEN[:4] + b"\x02\x00" + GOLDEN_TOKEN[6:])


def test_one_is_not_taken_for_the_other() -> None:
    with pytest.raises(ProtocolError, match="FKVA"):
        RemoteRegion.from_bytes(GOLDEN_ADDRESS)
    with pytest.raises(ProtocolError, match="FKVR"):
        EngineAddress.from_bytes(GOLDEN_REGION)
    with pytest.raises(ProtocolError, match="FKVR"):
        CounterToken.from_bytes(GOLDEN_REGION[:50])
    with pytest.raises(ProtocolError, match="counter token: expected bytes, got CounterToken"):
        CounterToken.from_bytes(TOKEN)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((EPOCH[:15], 0, 1, (1,), (((0, 0),),)), "length"),
        ((EPOCH + b"x", 0, 1, (1,), (((0, 0),),)), "length"),
        ((EPOCH, 64, 1, (1,), (((0, 0),),)), "63|64"),
        ((EPOCH, -1, 1, (1,), (((0, 0),),)), "0"),
        ((EPOCH, 0, 2**63, (2**63,), (((0, 0),),)), "9223372036854775807|int"),
        ((EPOCH, 0, -1, (-1,), (((0, 0),),)), "0"),
        ((EPOCH, 0, 1, (1,), ()), "length"),
        ((EPOCH, 0, 1, (1,), (((0, 0),),) * 65), "length"),
        ((EPOCH, 0, 1, (1,), (((0, -1),),)), "0"),
        ((EPOCH, 0, 1, (1,), (((0,),),)), "length"),
        ((EPOCH, 0, 1, (1,), (((0, 1.5),),)), "float"),
        ((EPOCH, "0", 1, (1,), (((0, 0),),)), "str"),
        ((EPOCH, 0, 1, (), ((),)), "length"),
        ((EPOCH, 0, 0, (0,), (((0, 0),),)), "must ascend"),
        ((EPOCH, 0, 9, (4, 8), (((0, 0), (0, 0)),)), "must ascend to nbytes=9"),
        ((EPOCH, 0, 8, (4, 4, 8), (((0, 0), (0, 0), (0, 0)),)), "must ascend"),
        ((EPOCH, 0, 8, (4, 8), (((0, 0),),)), "every rail must have 2 keys"),
    ],
)
def test_values_out_of_range_are_refused_with_their_limit(fields: tuple[object, ...], words: str) -> None:
    data = RemoteRegion.MAGIC + b"\x01\x00" + msgspec.msgpack.encode(fields)
    with pytest.raises(ProtocolError, match=words):
        RemoteRegion.from_bytes(data)


@pytest.mark.parametrize(
    "groups",
    [(), ((),), ((b"",),), ((b"x" * 1025,),), ((b"x",) * 65,), ((b"x",),) * 65, (("text",),), b"x"],
    ids=["no group", "no rail", "empty", "long", "65 rails", "65 groups", "text", "bytes"],
)
def test_addresses_out_of_range_are_refused(groups: object) -> None:
    data = EngineAddress.MAGIC + b"\x02\x00" + msgspec.msgpack.encode((EPOCH, groups, None))
    with pytest.raises(ProtocolError, match="engine address"):
        EngineAddress.from_bytes(data)


@pytest.mark.parametrize(
    "token",
    [
        (2**17 - 1, 0, 1, 0),
        (0, 32, 1, 0),
        (0, 0, 0, 0),
        (0, 0, 2**63, 0),
        (0, 0, 1, 64),
        (-1, 0, 1, 0),
        (0, 0),
        (0, 0, 1.5, 0),
        (0, "0", 1, 0),
        {},
        7,
    ],
)
def test_tokens_out_of_range_are_refused(token: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(token), type=CounterToken)
    with pytest.raises(ProtocolError, match="counter token: "):
        CounterToken.from_bytes(CounterToken.MAGIC + b"\x01\x00" + msgspec.msgpack.encode(token))


@given(st.sampled_from([GOLDEN_REGION, GOLDEN_ADDRESS, GOLDEN_SEEN, GOLDEN_TOKEN]), st.data())
def test_any_damage_is_refused_or_still_in_range(golden: bytes, data: st.DataObject) -> None:
    damaged = bytearray(golden)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    for cls in (RemoteRegion, EngineAddress):
        try:
            parsed = cls.from_bytes(bytes(damaged))
        except ProtocolError:
            continue
        assert len(parsed.epoch) == 16
        assert cls.from_bytes(parsed.to_bytes()) == parsed
    try:
        token = CounterToken.from_bytes(bytes(damaged))
    except ProtocolError:
        return
    assert 0 <= token.slot < 2**17 - 1
    assert 0 <= token.generation < 32
    assert 0 < token.unit_bytes < 2**63
    assert 0 <= token.group < 64
    assert CounterToken.from_bytes(token.to_bytes()) == token


def test_oversized_bytes_are_refused_unparsed() -> None:
    with pytest.raises(ProtocolError, match="above the limit of 67108864"):
        RemoteRegion.from_bytes(GOLDEN_REGION + bytes(64 << 20))
    with pytest.raises(ProtocolError, match="above the limit of 1048576"):
        EngineAddress.from_bytes(GOLDEN_ADDRESS + bytes(1 << 20))
    with pytest.raises(ProtocolError, match="above the limit of 64"):
        CounterToken.from_bytes(GOLDEN_TOKEN + bytes(64))
