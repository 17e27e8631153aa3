"""Tenants as tests want them."""

from services.gateway.identity.tenants import TenantRecord, TenantStore


async def put(tenants: TenantStore, record: TenantRecord) -> None:
    """In place of the one of its name, if there is one."""
    fields = record.model_dump()
    if await tenants.add(record.name, fields) is None:
        await tenants.change(record.name, "tenant.change", lambda _: fields)
