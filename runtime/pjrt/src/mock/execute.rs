//! Running programs: those within a process as they are, those over several whole in each.

use super::{Failed, Node, address, answer, own_error, pointer, real, with_state};
use crate::api::slice;
use crate::sys::{self, PJRT_Error};
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// All devices of an executable, as the real plugin has them.
fn all_devices(executable: *mut sys::PJRT_LoadedExecutable) -> Result<Vec<usize>, Failed> {
    let mut args = sys::PJRT_LoadedExecutable_AddressableDevices_Args::new();
    args.executable = executable;
    // SAFETY: the executable is live, and the list as long.
    unsafe {
        real(&mut args)?;
        Ok(slice(args.devices, args.num_devices)
            .iter()
            .map(|device| address(*device))
            .collect())
    }
}

/// The client of a device.
fn node_of(devices: &[usize]) -> Result<Arc<Node>, Failed> {
    let found = with_state(|state| {
        let mut clients = state.clients.iter();
        let has = |node: &&Arc<Node>| {
            let mut all = node.all.iter();
            devices
                .first()
                .is_some_and(|first| all.any(|(device, _)| device == first))
        };
        clients.find(has).cloned()
    });
    found.ok_or_else(|| own_error(3, "the executable has no devices of its own"))
}

pub(super) unsafe extern "C" fn own_devices(
    args: *mut sys::PJRT_LoadedExecutable_AddressableDevices_Args,
) -> *mut PJRT_Error {
    // SAFETY: the arguments are complete; lists that are handed out are never freed.
    answer(unsafe { list_own(&mut *args) })
}

unsafe fn list_own(
    args: &mut sys::PJRT_LoadedExecutable_AddressableDevices_Args,
) -> Result<(), Failed> {
    let key = address(args.executable);
    let known = with_state(|state| state.own.get(&key).copied());
    let own = match known {
        Some(own) => own,
        None => {
            let all = all_devices(args.executable)?;
            let node = node_of(&all)?;
            let own: Vec<usize> = all.into_iter().filter(|d| node.own.contains(d)).collect();
            let own: &'static [usize] = Vec::leak(own);
            with_state(|state| state.own.insert(key, own));
            own
        }
    };
    args.devices = own.as_ptr().cast();
    args.num_devices = own.len();
    Ok(())
}

pub(super) unsafe extern "C" fn destroy(
    args: *mut sys::PJRT_LoadedExecutable_Destroy_Args,
) -> *mut PJRT_Error {
    // SAFETY: the arguments are complete.
    unsafe {
        let executable = (*args).executable.addr();
        with_state(|state| state.own.remove(&executable));
        answer(real(&mut *args))
    }
}

pub(super) unsafe extern "C" fn execute(
    args: *mut sys::PJRT_LoadedExecutable_Execute_Args,
) -> *mut PJRT_Error {
    // SAFETY: the arguments are complete.
    let args = unsafe { &mut *args };
    let mut run = || {
        let all = all_devices(args.executable)?;
        let node = node_of(&all)?;
        if all.iter().all(|device| node.own.contains(device)) {
            // SAFETY: they come from the caller.
            return unsafe { real(args) };
        }
        // SAFETY: as above.
        unsafe { run_whole(args, &node, &all) }
    };
    answer(run())
}

/// Destroyed at the end, also if that is an early one.
struct Buffers(Vec<usize>);

impl Drop for Buffers {
    fn drop(&mut self) {
        for buffer in self.0.drain(..) {
            let mut args = sys::PJRT_Buffer_Destroy_Args::new();
            args.buffer = pointer(buffer);
            // SAFETY: it was handed over, and nobody else has it.
            if let Err(error) = unsafe { real(&mut args) } {
                forget(error);
            }
        }
    }
}

/// Lets an error be that nobody can be told of; it is never freed.
fn forget(_: Failed) {}

/// # Safety
///
/// `args` are complete arguments for the own ones of `all`.
unsafe fn run_whole(
    args: &mut sys::PJRT_LoadedExecutable_Execute_Args,
    node: &Node,
    all: &[usize],
) -> Result<(), Failed> {
    if !args.execute_device.is_null() {
        return Err(own_error(
            12,
            "programs over processes start on all devices at once",
        ));
    }
    let Some(store) = &node.store else {
        return Err(own_error(9, "there is no key-value store"));
    };
    // SAFETY: the options are complete.
    let launch = unsafe { (*args.options).launch_id };
    let number = node.launches.fetch_add(1, Ordering::SeqCst);
    in_order(node, number, launch)?;

    let own: Vec<Option<usize>> = {
        let mut next = 0..;
        let is_own = |device: &usize| node.own.contains(device);
        all.iter()
            .map(|d| is_own(d).then(|| next.next()).flatten())
            .collect()
    };
    // SAFETY: the lists have the lengths that the arguments say.
    let lists = unsafe { slice(args.argument_lists, args.num_devices) };
    let own_args: Vec<&[*mut sys::PJRT_Buffer]> = lists
        .iter()
        // SAFETY: as above.
        .map(|list| unsafe { slice(*list, args.num_args) })
        .collect();
    let key = |place: usize, arg: usize| format!("mock/launch/{launch}/{place}/{arg}");
    for (place, own) in own.iter().enumerate() {
        let buffers = own
            .and_then(|own| own_args.get(own))
            .copied()
            .unwrap_or_default();
        for (arg, buffer) in buffers.iter().enumerate() {
            // SAFETY: the caller's buffers are live.
            let bytes = unsafe { to_host(*buffer)? };
            store.put(&key(place, arg), &bytes)?;
        }
    }
    let mut fetched = Buffers(Vec::new());
    let mut inputs: Vec<Vec<*mut sys::PJRT_Buffer>> = Vec::new();
    for (place, (device, own)) in all.iter().zip(&own).enumerate() {
        if let Some(own) = own.and_then(|own| own_args.get(own)) {
            inputs.push(own.to_vec());
            continue;
        }
        let mut list = Vec::new();
        for arg in 0..args.num_args {
            let bytes = store.get(&key(place, arg))?;
            let like = own_args.first().and_then(|args| args.get(arg)).copied();
            let like = like.ok_or_else(|| own_error(3, "no argument to go by"))?;
            // SAFETY: client, device and buffer are live.
            let buffer = unsafe { from_host(node, *device, &bytes, like)? };
            fetched.0.push(address(buffer));
            list.push(buffer);
        }
        inputs.push(list);
    }

    let outputs = count_outputs(args.executable)?;
    let mut results = vec![vec![null_mut::<sys::PJRT_Buffer>(); outputs]; all.len()];
    let mut events = vec![null_mut::<sys::PJRT_Event>(); all.len()];
    let input_lists: Vec<_> = inputs.iter().map(|list| list.as_ptr()).collect();
    let output_lists: Vec<_> = results.iter_mut().map(|list| list.as_mut_ptr()).collect();
    let mut whole = sys::PJRT_LoadedExecutable_Execute_Args::new();
    whole.executable = args.executable;
    // The processes may be one, of which XLA takes launches of one id for one launch.
    // SAFETY: the options are complete, and all that they point to lives as long as the caller's.
    let mut options = unsafe { args.options.read() };
    options.launch_id = 0;
    whole.options = &raw mut options;
    whole.argument_lists = input_lists.as_ptr();
    whole.num_devices = all.len();
    whole.num_args = args.num_args;
    whole.output_lists = output_lists.as_ptr();
    whole.device_complete_events = events.as_mut_ptr();
    // SAFETY: the lists have the lengths that are said, and live across the call.
    unsafe { real(&mut whole)? };

    let mut others = Buffers(Vec::new());
    for ((own, results), event) in own.iter().zip(&results).zip(events) {
        let Some(own) = own else {
            others
                .0
                .extend(results.iter().map(|buffer| address(*buffer)));
            let mut destroy = sys::PJRT_Event_Destroy_Args::new();
            destroy.event = event;
            // SAFETY: it was handed over.
            unsafe { real(&mut destroy)? };
            continue;
        };
        // SAFETY: the caller's lists have room for what its devices make.
        unsafe {
            let list = *args.output_lists.add(*own);
            for (index, buffer) in results.iter().enumerate() {
                *list.add(index) = *buffer;
            }
            if !args.device_complete_events.is_null() {
                *args.device_complete_events.add(*own) = event;
            }
        }
    }
    Ok(())
}

/// Whether the launch with this number is the same one everywhere, where all processes take part.
fn in_order(node: &Node, number: u64, launch: c_int) -> Result<(), Failed> {
    let Some(store) = &node.store else {
        return Ok(());
    };
    let key = |node: c_int| format!("mock/order/{number}/{node}");
    store.put(&key(node.node), launch.to_string().as_bytes())?;
    for other in 0..node.nodes {
        let theirs = store.get(&key(other))?;
        let theirs = String::from_utf8_lossy(&theirs).into_owned();
        if theirs != launch.to_string() {
            return Err(own_error(
                13,
                format!(
                    "launch {launch} is number {number} here, and {theirs} is on process {other}"
                ),
            ));
        }
    }
    Ok(())
}

/// # Safety
///
/// `buffer` is live.
unsafe fn to_host(buffer: *mut sys::PJRT_Buffer) -> Result<Vec<u8>, Failed> {
    let mut args = sys::PJRT_Buffer_ToHostBuffer_Args::new();
    args.src = buffer;
    // SAFETY: without room the call says how much is needed; with it, the bytes live until the event is awaited.
    unsafe {
        real(&mut args)?;
        let mut bytes = vec![0_u8; args.dst_size];
        args.dst = bytes.as_mut_ptr().cast();
        real(&mut args)?;
        wait(args.event)?;
        Ok(bytes)
    }
}

/// # Safety
///
/// `event` was handed over.
unsafe fn wait(event: *mut sys::PJRT_Event) -> Result<(), Failed> {
    let mut args = sys::PJRT_Event_Await_Args::new();
    args.event = event;
    let mut destroy = sys::PJRT_Event_Destroy_Args::new();
    destroy.event = event;
    // SAFETY: passed on from this function's contract.
    unsafe {
        let awaited = real(&mut args);
        real(&mut destroy)?;
        awaited
    }
}

/// # Safety
///
/// All are live; `like` says type and shape.
unsafe fn from_host(
    node: &Node,
    device: usize,
    bytes: &[u8],
    like: *mut sys::PJRT_Buffer,
) -> Result<*mut sys::PJRT_Buffer, Failed> {
    let mut ty = sys::PJRT_Buffer_ElementType_Args::new();
    ty.buffer = like;
    let mut shape = sys::PJRT_Buffer_Dimensions_Args::new();
    shape.buffer = like;
    let mut args = sys::PJRT_Client_BufferFromHostBuffer_Args::new();
    // SAFETY: passed on from this function's contract. The bytes live until the plugin is done with them.
    unsafe {
        real(&mut ty)?;
        real(&mut shape)?;
        args.client = pointer(node.client);
        args.data = bytes.as_ptr().cast();
        args.element_type = ty.element_type;
        args.dims = shape.dims;
        args.num_dims = shape.num_dims;
        args.host_buffer_semantics = sys::host_semantics::IMMUTABLE_UNTIL_TRANSFER_COMPLETES;
        args.device = pointer(device);
        real(&mut args)?;
        wait(args.done_with_host_buffer)?;
    }
    Ok(args.buffer)
}

fn count_outputs(executable: *mut sys::PJRT_LoadedExecutable) -> Result<usize, Failed> {
    let mut args = sys::PJRT_LoadedExecutable_GetExecutable_Args::new();
    args.loaded_executable = executable;
    let mut count = sys::PJRT_Executable_NumOutputs_Args::new();
    let mut destroy = sys::PJRT_Executable_Destroy_Args::new();
    // SAFETY: the executable is live; the description was handed over, and is given up.
    unsafe {
        real(&mut args)?;
        count.executable = args.executable;
        destroy.executable = args.executable;
        let counted = real(&mut count);
        real(&mut destroy)?;
        counted?;
    }
    Ok(count.num_outputs)
}
