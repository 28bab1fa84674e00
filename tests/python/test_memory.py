"""Out of memory on CPU: `--device_memory_bytes`, and what Python shows of it."""

PRELUDE = """
import numpy as np, jax, jax.numpy as jnp, harness
first, other = jax.devices()[:2]
MIB = 1 << 18  # of float32
def failure(make):
    try:
        jax.block_until_ready(make())
    except Exception as error:
        return str(error)
    raise AssertionError("it fits")
"""

TABLE = (
    PRELUDE
    + """
def puts_two_mebibytes():
    return jax.device_put(np.zeros(2 * MIB, np.float32), first)
def computes_two_more(x):
    return jax.jit(lambda x: x + 1)(x)
def asks_for_too_much(x):
    return jax.jit(lambda x: x * 2)(x)
a = puts_two_mebibytes()
b = computes_two_more(a)
message = failure(lambda: asks_for_too_much(b))
print(message)
assert message.startswith("RESOURCE_EXHAUSTED: out of memory on device 0"), message
assert "Pathways object-store summary for device 0 (cpu) at 2" in message, message
for line in ["asks_for_too_much", "puts_two_mebibytes", "computes_two_more"]:
    assert f"({line})" in message, line
table = message[message.index("object-store summary"):]
assert "device_put with 1 'ready' buffers of total size 2097152" in table, table
assert "of total size 2097152" in table[table.index("jit__lambda"):], table
# All else lives: what was there, other devices, and the same once there is room.
assert np.asarray(b)[0] == 1 and np.asarray(a).sum() == 0
assert np.asarray(asks_for_too_much(jax.device_put(b, other)))[0] == 2
del a
assert np.asarray(asks_for_too_much(b))[0] == 2
print("works")
"""
)

# Each step needs two of the four arrays that fit; none is waited for, so many are under way at once.
LOOP = (
    PRELUDE
    + """
x = jax.device_put(np.zeros(MIB, np.float32), first)
step = jax.jit(lambda x: jnp.sin(x) + 1)
for i in range(300):
    x = step(x)
x.block_until_ready()
y = jax.device_put(np.zeros(4 * MIB - 1000, np.float32), first)
donating = jax.jit(lambda x: x + 1, donate_argnums=0)
for i in range(300):
    y = donating(y)
assert np.asarray(y)[0] == 300
print("works")
"""
)


def test_the_exception_shows_what_lies_on_the_device(own_cluster):
    cluster = own_cluster("--devices_per_worker", "2", "--device_memory_bytes", "5MiB")
    status, output = cluster.run_code(TABLE, timeout=120)
    assert status == 0 and "works" in output, output[-6000:]
    memory = cluster.status()["workers"][0]["device_memory"]
    assert memory["limit_bytes"] == 5 << 20 and len(memory["used_bytes"]) == 2, memory


def test_what_fits_alone_fits_however_much_is_under_way(own_cluster):
    cluster = own_cluster("--devices_per_worker", "2", "--device_memory_bytes", "5MiB")
    status, output = cluster.run_code(LOOP, timeout=120)
    assert status == 0 and "works" in output, output[-6000:]
