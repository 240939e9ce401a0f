"""Keys against a real Redis: made once, kept as hashes, revoked in time."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis
from support.state import config_at, running_redis

from gateway.state import OUTAGE_S, open_redis
from gateway.trust.tenants import OPERATOR_TENANT, REVOCATION_S, Tenants
from grid.config import Config
from grid.errors import InvalidRequest, NotFound, Rejected, Unauthorised

pytestmark = pytest.mark.slow


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_key_names_its_tenant(redis: Redis, config: Config) -> None:
    tenants = Tenants(redis, config)
    made = await tenants.create_key("acme", label="for the shop")
    tenant = await tenants.authenticate(made.key)
    assert (tenant.tenant_id, tenant.key_id, tenant.operator) == ("acme", made.info.key_id, False)
    assert made.key.startswith("zg-")
    assert not made.key.startswith("zg-op-")


async def test_keys_of_a_tenant_share_its_salt_and_tenants_share_nothing(
    redis: Redis, config: Config
) -> None:
    tenants = Tenants(redis, config)
    salts = [
        (await tenants.authenticate((await tenants.create_key(name)).key)).salt
        for name in ("acme", "acme", "umbrella")
    ]
    assert salts[0] == salts[1] != salts[2]
    assert len(salts[0]) == 32


@pytest.mark.parametrize("wrong", ["", "sk-other", "zg-", "zg-unknown", "zg-" + "x" * 500, "zg-\udcff"])
async def test_a_wrong_key_is_refused(redis: Redis, config: Config, wrong: str) -> None:
    tenants = Tenants(redis, config)
    made = await tenants.create_key("acme")
    for presented in (wrong, made.key[:-1], made.key + "a", made.key.upper()):
        with pytest.raises(Unauthorised):
            await tenants.authenticate(presented)


async def test_only_hashes_are_stored(redis: Redis, config: Config) -> None:
    made = await Tenants(redis, config).create_key("acme")
    dumped = b"".join([await redis.dump(key) or b"" for key in await redis.keys("*")])
    assert made.info.key_id.encode() in dumped
    assert made.key.encode() not in dumped
    other_cell = config_at(config.cell.state_dir / "other")
    with pytest.raises(Unauthorised):
        await Tenants(redis, other_cell).authenticate(made.key)


async def test_a_revoked_key_ends_here_at_once_and_elsewhere_within_the_bound(
    redis: Redis, config: Config
) -> None:
    clock = Clock()
    here, elsewhere = Tenants(redis, config), Tenants(redis, config, clock=clock)
    made = await here.create_key("acme")
    await here.authenticate(made.key)
    await elsewhere.authenticate(made.key)
    await here.revoke_key(made.info.key_id)
    with pytest.raises(Unauthorised):
        await here.authenticate(made.key)
    assert (await elsewhere.authenticate(made.key)).tenant_id == "acme"
    clock.now_s += REVOCATION_S
    with pytest.raises(Unauthorised):
        await elsewhere.authenticate(made.key)
    with pytest.raises(NotFound):
        await here.revoke_key(made.info.key_id)


async def test_known_keys_work_for_a_while_when_redis_is_away(tmp_path: Path) -> None:
    config, clock = config_at(tmp_path), Clock()
    with running_redis(tmp_path):
        client = await open_redis(config)
        tenants = Tenants(client, config, clock=clock)
        made = await tenants.create_key("acme")
        await tenants.authenticate(made.key)
        revoked = await tenants.create_key("acme")
        await tenants.authenticate(revoked.key)
        await Tenants(client, config).revoke_key(revoked.info.key_id)
        clock.now_s += REVOCATION_S
        with pytest.raises(Unauthorised):
            await tenants.authenticate(revoked.key)
        await tenants.authenticate(made.key)
    clock.now_s += REVOCATION_S + OUTAGE_S - 0.1
    assert (await tenants.authenticate(made.key)).tenant_id == "acme"
    with pytest.raises(Rejected):
        await tenants.authenticate(revoked.key)
    clock.now_s += 0.2
    with pytest.raises(Rejected):
        await tenants.authenticate(made.key)
    await client.aclose()


async def test_the_first_keys_are_made_once(redis: Redis, config: Config) -> None:
    tenants = Tenants(redis, config)
    keys = await tenants.bootstrap()
    operator = await tenants.authenticate(keys["operator_key"])
    assert operator.operator
    assert operator.tenant_id == OPERATOR_TENANT
    assert not (await tenants.authenticate(keys["tenant_key"])).operator
    assert await tenants.bootstrap() == {}
    assert len(await tenants.list_keys()) == 2


async def test_lists_show_no_secret_and_only_what_was_asked(redis: Redis, config: Config) -> None:
    tenants = Tenants(redis, config)
    made = [await tenants.create_key(name) for name in ("acme", "umbrella")]
    assert [info.key_id for info in await tenants.list_keys("acme")] == [made[0].info.key_id]
    assert {info.tenant_id for info in await tenants.list_keys()} == {"acme", "umbrella"}
    assert made[0].key not in repr(await tenants.list_keys())


@pytest.mark.parametrize("name", ["", "Acme", "a b", "-a", "a" * 64, "a/b", "a.b", "ümlaut", OPERATOR_TENANT])
async def test_a_name_that_can_not_be_a_tenants_is_refused(redis: Redis, config: Config, name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await Tenants(redis, config).create_key(name)
    assert refused.value.param == "tenant_id"
