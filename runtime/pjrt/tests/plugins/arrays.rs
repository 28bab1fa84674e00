//! Arrays between host and devices.

use crate::support::{Which, aligned, bytes_of, code, fetch, fetch_floats, put};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use waystation_pjrt::{AlignedBytes, Client, Code, ElementType, HostBytes};

fn memory(client: &Client) -> &waystation_pjrt::Memory {
    let device = &client.devices()[0];
    &device.memories()[device.default_memory()]
}

pub(crate) fn shapes_survive(which: Which) {
    let client = which.client();
    let shapes: &[&[i64]] = &[
        &[],
        &[1],
        &[7],
        &[2, 3],
        &[3, 2, 5],
        &[1, 1, 1, 1],
        &[0],
        &[0, 4],
        &[4, 0, 2],
    ];
    for dims in shapes {
        let count = usize::try_from(dims.iter().product::<i64>()).expect("few");
        let bytes: Vec<u8> = (0..count * 4)
            .map(|index| u8::try_from(index % 251).expect("small"))
            .collect();
        let buffer = client
            .buffer_from_host(
                aligned(&bytes),
                ElementType::F32,
                dims,
                None,
                memory(&client),
            )
            .expect("a buffer");
        assert_eq!(buffer.dims(), *dims);
        assert_eq!(buffer.element_type(), ElementType::F32);
        buffer
            .ready()
            .expect("an event")
            .wait()
            .expect("it is filled");
        assert_eq!(buffer.host_bytes(), Ok(bytes.len()), "{dims:?}");
        assert!(
            buffer.on_device_bytes().expect("a size") >= u64::try_from(bytes.len()).expect("small")
        );
        assert_eq!(fetch(&buffer), Ok(bytes), "{dims:?}");
    }
    // Not aligned for use in place: the bytes are copied.
    let mut bytes = vec![0xff; 4];
    bytes.extend(bytes_of(&[1.0, 2.0, 3.0]));
    struct Tail(AlignedBytes);
    impl AsRef<[u8]> for Tail {
        fn as_ref(&self) -> &[u8] {
            &self.0[4..]
        }
    }
    let mut block = AlignedBytes::zeroed(bytes.len()).expect("memory");
    block.copy_from_slice(&bytes);
    let buffer = client
        .buffer_from_host(
            Arc::new(Tail(block)),
            ElementType::F32,
            &[3],
            None,
            memory(&client),
        )
        .expect("a buffer");
    assert_eq!(fetch_floats(&buffer), [1.0, 2.0, 3.0]);
}

pub(crate) fn strides_are_followed(which: Which) {
    let client = which.client();
    let values: Vec<f32> = (0..12_u8).map(f32::from).collect();
    let host = aligned(&bytes_of(&values));
    let strided = |dims: &[i64], strides: &[i64]| {
        let buffer = client
            .buffer_from_host(
                Arc::clone(&host),
                ElementType::F32,
                dims,
                Some(strides),
                memory(&client),
            )
            .expect("a buffer");
        fetch_floats(&buffer)
    };
    assert_eq!(strided(&[3, 4], &[16, 4]), values);
    // Transposed.
    assert_eq!(
        strided(&[4, 3], &[4, 16]),
        [0., 4., 8., 1., 5., 9., 2., 6., 10., 3., 7., 11.]
    );
    // Every second.
    assert_eq!(strided(&[6], &[8]), [0., 2., 4., 6., 8., 10.]);
    // Backwards.
    assert_eq!(strided(&[3], &[-16]), [8., 4., 0.]);
    // The same one again and again.
    assert_eq!(strided(&[2, 2], &[4, 0]), [0., 0., 1., 1.]);
}

pub(crate) fn wrong_arguments_are_refused(which: Which) {
    let client = which.client();
    let host = aligned(&[0; 16]);
    let make = |dims: &[i64], strides: Option<&[i64]>| {
        code(client.buffer_from_host(
            Arc::clone(&host),
            ElementType::F32,
            dims,
            strides,
            memory(&client),
        ))
    };
    let invalid = Some(Code::InvalidArgument);
    assert_eq!(make(&[5], None), invalid);
    assert_eq!(make(&[-1], None), invalid);
    assert_eq!(make(&[i64::MAX, i64::MAX], None), invalid);
    assert_eq!(make(&[2, 2], Some(&[8])), invalid);
    assert_eq!(make(&[2, 2], Some(&[16, 4])), invalid);
    let other = which.new_client();
    let foreign = client.buffer_from_host(host, ElementType::F32, &[4], None, memory(&other));
    assert_eq!(code(foreign), invalid);
    let token =
        client.buffer_from_host(aligned(&[]), ElementType::Token, &[], None, memory(&client));
    assert_eq!(code(token), invalid);
    let buffer = put(&client, 0, &[1.0]);
    assert_eq!(code(buffer.copy_to_device(&other.devices()[1])), invalid);
    assert_eq!(code(buffer.copy_to_memory(memory(&other))), invalid);
}

pub(crate) fn copies_between_devices_and_memories(which: Which) {
    let client = which.client();
    let buffer = put(&client, 0, &[1.0, 2.0]);
    let copy = buffer.copy_to_device(&client.devices()[1]).expect("a copy");
    assert_eq!(fetch_floats(&copy), [1.0, 2.0]);
    let pinned = client.devices()[2]
        .memory_of_kind("pinned_host")
        .expect("a pinned memory");
    let copy = buffer.copy_to_memory(pinned).expect("a copy");
    drop(buffer);
    assert_eq!(fetch_floats(&copy), [1.0, 2.0]);
    let direct = client
        .buffer_from_host(
            aligned(&bytes_of(&[3.0])),
            ElementType::F32,
            &[1],
            None,
            pinned,
        )
        .expect("a buffer");
    assert_eq!(fetch_floats(&direct), [3.0]);
}

pub(crate) fn deletion(which: Which) {
    let client = which.client();
    let buffer = put(&client, 0, &[1.0, 2.0]);
    let same = buffer.clone();
    assert_eq!(buffer.is_deleted(), Ok(false));
    buffer.delete().expect("it is deleted");
    assert_eq!(same.is_deleted(), Ok(true));
    assert_eq!(same.dims(), [2]);
    let error = fetch(&same).expect_err("nothing to fetch");
    assert!(
        error.is_from_plugin() && error.message().contains("delete"),
        "{error}"
    );
    // Once more does no harm.
    buffer.delete().expect("it is deleted");
}

/// Counts its own end.
struct Counted(AlignedBytes, Arc<AtomicUsize>);

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

pub(crate) fn host_bytes_are_released(which: Which) {
    let client = which.client();
    let gone = Arc::new(AtomicUsize::new(0));
    for len in [4_usize, 4 << 10, 4 << 20] {
        let host: HostBytes = Arc::new(Counted(
            AlignedBytes::zeroed(len).expect("memory"),
            Arc::clone(&gone),
        ));
        let dims = [i64::try_from(len / 4).expect("small")];
        let buffer = client
            .buffer_from_host(host, ElementType::F32, &dims, None, memory(&client))
            .expect("a buffer");
        buffer
            .ready()
            .expect("an event")
            .wait()
            .expect("it is filled");
        assert!(
            fetch(&buffer)
                .expect("the bytes")
                .iter()
                .all(|byte| *byte == 0)
        );
    }
    // The buffers are gone, and so the bytes go, on whatever thread does it.
    wait_for(&gone, 3);
}

/// Waits until `count` hosts' bytes are gone.
fn wait_for(gone: &AtomicUsize, count: usize) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while gone.load(Ordering::SeqCst) < count {
        assert!(Instant::now() < deadline, "host bytes were not released");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn aligned_bytes_are_used_in_place(which: Which) {
    /// The bytes from the fifth one on, which are not aligned.
    struct Tail(Counted);
    impl AsRef<[u8]> for Tail {
        fn as_ref(&self) -> &[u8] {
            &self.0.as_ref()[4..]
        }
    }
    let client = which.client();
    let gone = Arc::new(AtomicUsize::new(0));
    let host = |len| {
        Counted(
            AlignedBytes::zeroed(len).expect("memory"),
            Arc::clone(&gone),
        )
    };
    let put = |host: HostBytes| {
        let buffer = client
            .buffer_from_host(host, ElementType::F32, &[1 << 18], None, memory(&client))
            .expect("a buffer");
        buffer
            .ready()
            .expect("an event")
            .wait()
            .expect("it is filled");
        buffer
    };
    let copied = put(Arc::new(Tail(host(4 + (1 << 20)))));
    wait_for(&gone, 1);
    let in_place = put(Arc::new(host(1 << 20)));
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(
        gone.load(Ordering::SeqCst),
        1,
        "the device reads these bytes"
    );
    drop(in_place);
    wait_for(&gone, 2);
    assert_eq!(copied.is_deleted(), Ok(false));
}

pub(crate) fn fetching_needs_room(which: Which) {
    let client = which.client();
    let buffer = put(&client, 0, &[1.0, 2.0]);
    let short = AlignedBytes::zeroed(7).expect("memory");
    assert_eq!(code(buffer.to_host(short)), Some(Code::InvalidArgument));
    let long = AlignedBytes::zeroed(100).expect("memory");
    let bytes =
        futures::executor::block_on(buffer.to_host(long).expect("it starts")).expect("the bytes");
    assert_eq!(&*bytes, bytes_of(&[1.0, 2.0]));
}

pub(crate) fn parts_are_fetched_where_the_plugin_can(which: Which) {
    let client = which.client();
    let values = [1.0, 2.0, 3.0, 4.0, 5.0];
    let buffer = put(&client, 0, &values);
    let part = |offset, len| {
        let room = AlignedBytes::zeroed(len).expect("memory");
        futures::executor::block_on(buffer.part_to_host(offset, room)?)
    };
    match part(4, 12) {
        Ok(bytes) => {
            assert_eq!(&*bytes, &bytes_of(&values)[4..16]);
            assert_eq!(&*part(19, 1).expect("the last"), &bytes_of(&values)[19..]);
        }
        Err(error) => assert_eq!(error.code(), Code::Unimplemented, "{error}"),
    }
    let invalid = Some(Code::InvalidArgument);
    assert_eq!(code(part(8, 13)), invalid);
    assert_eq!(code(part(u64::MAX, 2)), invalid);
    assert_eq!(code(part(0, 0)), invalid);
}

pub(crate) fn arrays_on_the_host_are_seen_in_place(which: Which) {
    let client = which.client();
    let values = [1.0, 2.0, 3.0, 4.0, 5.0];
    let buffer = put(&client, 0, &values);
    let filled = buffer.ready().expect("an event");
    filled.wait().expect("it is filled");
    let view = buffer
        .host_view()
        .expect("a view")
        .expect("the device is the host");
    assert_eq!(view.as_ref(), bytes_of(&values));
    // Two at a time, and the same memory.
    let other = buffer.host_view().expect("a view").expect("as before");
    assert_eq!(other.as_ref().as_ptr(), view.as_ref().as_ptr());
    drop(view);
    // Many at a time, from many threads: plugins count them without a lock.
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| {
                for _ in 0..20_000 {
                    let views = [(); 3].map(|()| buffer.host_view().expect("a view"));
                    assert!(views.iter().all(Option::is_some));
                }
            });
        }
    });
    // The view keeps the array.
    drop(buffer);
    assert_eq!(other.as_ref(), bytes_of(&values));
    drop(other);
    let empty = put(&client, 0, &[]);
    empty.ready().expect("an event").wait().expect("filled");
    let view = empty.host_view().expect("a view").expect("as before");
    assert!(view.as_ref().is_empty());
    drop(view);
    let deleted = put(&client, 0, &values);
    deleted.delete().expect("deleted");
    assert!(deleted.host_view().is_err());
}

pub(crate) fn layouts_are_kept_and_told(which: Which) {
    let client = which.client();
    let bytes = bytes_of(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    for order in [[0, 1], [1, 0]] {
        let buffer = client
            .buffer_from_host_in_order(
                aligned(&bytes),
                ElementType::F32,
                &[2, 3],
                &order,
                memory(&client),
            )
            .expect("a buffer");
        assert_eq!(buffer.minor_to_major(), Ok(Some(order.to_vec())));
        // Row-major on the host, whatever lies on the device; one plugin gives what lies there.
        if which != Which::FastAtomStruct {
            assert_eq!(fetch(&buffer), Ok(bytes.clone()), "{order:?}");
        }
    }
    let refused = client.buffer_from_host_in_order(
        aligned(&[]),
        ElementType::F32,
        &[0, 3],
        &[0, 1],
        memory(&client),
    );
    assert_eq!(code(refused), Some(Code::InvalidArgument));
}
