//! Running a program.

use crate::buffer::{Buffer, RawBuffer};
use crate::context::{self, ExecuteContext};
use crate::device::Device;
use crate::error::Error;
use crate::event::{Event, RawEvent};
use crate::executable::LoadedExecutable;
use crate::sys;
use std::mem::offset_of;
use std::ptr::{null, null_mut};
use std::sync::Arc;

/// How to run a program once.
#[derive(Clone, Debug, Default)]
pub struct ExecuteOptions {
    /// Number of the launch, the same on all hosts of one; zero for none.
    pub launch_id: i32,
    /// Positions of arguments that must survive although the program donates them.
    pub non_donatable: Vec<i64>,
}

/// An execution under way.
#[derive(Debug)]
#[must_use = "outputs and outcome of the execution are in here"]
pub struct Execution {
    /// Outputs by device and position; filled when the work is done.
    pub outputs: Vec<Vec<Buffer>>,
    /// By device, when its part is done, and with what outcome.
    pub done: Vec<Event>,
}

/// See [`LoadedExecutable::execute`].
pub(crate) fn execute(
    executable: &LoadedExecutable,
    args: &[Vec<&Buffer>],
    options: &ExecuteOptions,
) -> Result<Execution, Error> {
    const FUNCTION: &str = "PJRT_LoadedExecutable_Execute";
    let devices = executable.device_ids().len();
    if args.len() != devices {
        return Err(Error::invalid(
            FUNCTION,
            format!(
                "{} lists of arguments do not fit {devices} devices",
                args.len()
            ),
        ));
    }
    let num_args = args.first().map_or(0, Vec::len);
    let mut inputs = Vec::with_capacity(devices * num_args);
    for list in args {
        if list.len() != num_args {
            return Err(Error::invalid(
                FUNCTION,
                format!(
                    "one device gets {num_args} arguments and another {}",
                    list.len()
                ),
            ));
        }
        for buffer in list {
            executable.inner().owns(buffer.inner().id, FUNCTION)?;
            inputs.push(buffer.raw());
        }
    }
    check_kept(options, num_args, FUNCTION)?;
    let num_outputs = executable.num_outputs();
    let mut outputs = vec![null_mut::<sys::PJRT_Buffer>(); devices * num_outputs];
    let mut done = vec![null_mut::<sys::PJRT_Event>(); devices];
    let input_lists = rows(&mut inputs, devices, num_args);
    let output_lists = rows(&mut outputs, devices, num_outputs);

    let mut raw_options = raw(options, context::none(executable.inner().plugin()));
    let mut call = sys::PJRT_LoadedExecutable_Execute_Args::new();
    call.executable = executable.raw();
    call.options = &raw mut raw_options;
    call.argument_lists = input_lists.as_ptr().cast();
    call.num_devices = devices;
    call.num_args = num_args;
    call.output_lists = output_lists.as_ptr();
    call.device_complete_events = done.as_mut_ptr();
    // SAFETY: executable and arguments are live and of one client. The lists have the lengths that are said and
    // live across the call; the plugin writes one buffer an output and one event a device, and hands them over.
    unsafe { executable.inner().api().call(&mut call)? };

    // First take all over, so that whatever fails below, each is destroyed.
    let plugin = executable.inner().plugin();
    let done: Vec<_> = done
        .into_iter()
        // SAFETY: handed over by the call.
        .map(|event| unsafe { RawEvent::take(plugin, event, FUNCTION) })
        .collect();
    let outputs: Vec<_> = outputs
        .into_iter()
        // SAFETY: handed over by the call.
        .map(|buffer| unsafe { RawBuffer::take(executable.inner(), buffer, FUNCTION) })
        .collect();
    let done = done
        .into_iter()
        .map(|event| event.map(Event::new))
        .collect::<Result<_, _>>()?;
    let mut outputs = outputs.into_iter();
    let mut by_device = Vec::with_capacity(devices);
    for _ in 0..devices {
        let row = outputs.by_ref().take(num_outputs);
        by_device.push(
            row.map(|buffer| buffer?.describe())
                .collect::<Result<Vec<_>, _>>()?,
        );
    }
    Ok(Execution {
        outputs: by_device,
        done,
    })
}

/// The options as the plugin takes them. They refer to `options`.
fn raw(
    options: &ExecuteOptions,
    context: *mut sys::PJRT_ExecuteContext,
) -> sys::PJRT_ExecuteOptions {
    sys::PJRT_ExecuteOptions {
        struct_size: offset_of!(sys::PJRT_ExecuteOptions, multi_slice_config) + size_of::<usize>(),
        extension_start: null_mut(),
        send_callbacks: null_mut(),
        recv_callbacks: null_mut(),
        num_send_ops: 0,
        num_recv_ops: 0,
        launch_id: options.launch_id,
        non_donatable_input_indices: options.non_donatable.as_ptr(),
        num_non_donatable_input_indices: options.non_donatable.len(),
        context,
        call_location: null(),
        num_tasks: 0,
        task_ids: null_mut(),
        incarnation_ids: null_mut(),
        multi_slice_config: null_mut(),
    }
}

/// An execution under way on one device.
#[derive(Debug)]
#[must_use = "outputs and outcome of the execution are in here"]
pub struct OneExecution {
    /// Outputs by position; filled when the work is done.
    pub outputs: Vec<Buffer>,
    /// When the work is done, and with what outcome.
    pub done: Event,
}

/// See [`LoadedExecutable::execute_on`].
pub(crate) fn execute_on(
    executable: &LoadedExecutable,
    device: &Device,
    args: &[&Buffer],
    options: &ExecuteOptions,
    context: Option<&ExecuteContext>,
) -> Result<OneExecution, Error> {
    const FUNCTION: &str = "PJRT_LoadedExecutable_Execute";
    let inner = executable.inner();
    inner.owns(device.client, FUNCTION)?;
    let mut inputs = Vec::with_capacity(args.len());
    for buffer in args {
        inner.owns(buffer.inner().id, FUNCTION)?;
        inputs.push(buffer.raw());
    }
    check_kept(options, args.len(), FUNCTION)?;
    if context.is_some_and(|context| !Arc::ptr_eq(context.plugin(), inner.plugin())) {
        return Err(Error::invalid(
            FUNCTION,
            "the context belongs to another plugin",
        ));
    }
    let mut outputs = vec![null_mut::<sys::PJRT_Buffer>(); executable.num_outputs()];
    let mut done = null_mut::<sys::PJRT_Event>();
    let input_list = inputs.as_ptr();
    let output_list = outputs.as_mut_ptr();
    let mut raw_options = raw(
        options,
        context.map_or_else(|| context::none(inner.plugin()), ExecuteContext::raw),
    );
    let mut call = sys::PJRT_LoadedExecutable_Execute_Args::new();
    call.executable = executable.raw();
    call.options = &raw mut raw_options;
    call.argument_lists = &raw const input_list;
    call.num_devices = 1;
    call.num_args = args.len();
    call.output_lists = &raw const output_list;
    call.device_complete_events = &raw mut done;
    call.execute_device = device.raw;
    // SAFETY: executable, arguments, device and context are live and of one client or plugin. The lists have the lengths
    // that are said and live across the call; the plugin writes one buffer an output and one event, and hands them over.
    // The context is kept below for as long as the execution may use it.
    unsafe { inner.api().call(&mut call)? };

    // First take all over, so that whatever fails below, each is destroyed.
    // SAFETY: handed over by the call.
    let done = unsafe { RawEvent::take(inner.plugin(), done, FUNCTION) };
    let outputs: Vec<_> = outputs
        .into_iter()
        // SAFETY: handed over by the call.
        .map(|buffer| unsafe { RawBuffer::take(inner, buffer, FUNCTION) })
        .collect();
    match (&done, context) {
        (Ok(done), Some(context)) => done.keep(context.clone()),
        // It cannot be told when the execution ends.
        (Err(_), Some(context)) => std::mem::forget(context.clone()),
        (_, None) => {}
    }
    Ok(OneExecution {
        done: Event::new(done?),
        outputs: outputs
            .into_iter()
            .map(|buffer| buffer?.describe())
            .collect::<Result<_, _>>()?,
    })
}

/// Refuses positions of arguments that are not there: plugins index their own lists with them.
fn check_kept(
    options: &ExecuteOptions,
    num_args: usize,
    function: &'static str,
) -> Result<(), Error> {
    for position in &options.non_donatable {
        if usize::try_from(*position).map_or(true, |position| position >= num_args) {
            return Err(Error::invalid(
                function,
                format!("argument {position} cannot be kept from donation, there are {num_args}"),
            ));
        }
    }
    Ok(())
}

/// Pointers to the rows of a flat table.
fn rows<T>(table: &mut [T], count: usize, len: usize) -> Vec<*mut T> {
    let start = table.as_mut_ptr();
    // Within the table, or one behind its end for rows of nothing.
    (0..count)
        .map(|row| start.wrapping_add(row * len))
        .collect()
}
