"""What a client sees of the cluster before it runs anything."""

import sys

import jax
from harness import check, main, server_only, status
from orbax.checkpoint import multihost


@check
def all_devices_are_there_and_local():
    assert len(jax.devices()) == 8, jax.devices()
    assert jax.devices() == jax.local_devices()
    assert jax.device_count() == jax.local_device_count() == 8
    assert jax.process_index() == 0 and jax.process_count() == 1
    assert len({device.id for device in jax.devices()}) == 8
    assert [device.process_index for device in jax.devices()] == [0] * 8


@check
def platform_is_the_plugins():
    assert jax.devices()[0].platform == "cpu"
    assert jax.devices()[0].device_kind
    assert str(jax.devices()[0]) and repr(jax.devices()[0])


@check
def memories_are_the_plugins():
    for device in jax.devices():
        kinds = {memory.kind for memory in device.addressable_memories()}
        assert device.default_memory().kind in kinds
        assert kinds & {"device", "pinned_host", "unpinned_host"}, kinds


@check
@server_only
def every_device_has_a_slice():
    assert {device.slice_index for device in jax.devices()} == {0}


@check
@server_only
def runtime_type_is_the_one_orbax_asks_for():
    assert jax.devices()[0].client.runtime_type == "proxy/pathways"
    assert multihost.is_pathways_backend()


@check
def a_mesh_over_all_devices_can_be_made():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    assert mesh.devices.shape == (4, 2)
    assert len(set(mesh.devices.flat)) == 8


@check
@server_only
def status_page_knows_the_workers():
    page = status()
    assert page["workers"], page
    assert {"compiles", "bucket_hits", "array_bytes"} <= set(page["totals"]), page["totals"]


if __name__ == "__main__":
    sys.exit(main())
