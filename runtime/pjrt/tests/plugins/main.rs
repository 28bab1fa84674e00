//! The bindings against real CPU plugins of three ages.
//!
//! The plugins come from the Python environment of `WAYSTATION_TEST_PYTHON`, or else of `.venv` at the top of the
//! repository. One that is not there fails its tests.

mod arrays;
mod dtypes;
mod events;
mod facts;
mod programs;
mod serialized;
mod spanning;
mod support;

/// Runs each test against each plugin.
macro_rules! on_every_plugin {
    ($($room:ident: $($name:ident)*;)*) => {
        on_every_plugin!(@ lammps, Lammps: $($room: $($name)*;)*);
        on_every_plugin!(@ fastatomstruct, FastAtomStruct: $($room: $($name)*;)*);
        on_every_plugin!(@ xla_cpu_pjrt, XlaCpuPjrt: $($room: $($name)*;)*);
    };
    (@ $plugin:ident, $which:ident: $($room:ident: $($name:ident)*;)*) => {
        mod $plugin {
            $(mod $room {
                use crate::{$room, support::Which};
                $(#[test]
                fn $name() {
                    $room::$name(Which::$which);
                })*
            })*
        }
    };
}

on_every_plugin! {
    facts:
        versions_and_devices
        loading_twice_gives_one_plugin
        layouts;
    arrays:
        shapes_survive
        strides_are_followed
        layouts_are_kept_and_told
        wrong_arguments_are_refused
        copies_between_devices_and_memories
        deletion
        host_bytes_are_released
        aligned_bytes_are_used_in_place
        fetching_needs_room
        parts_are_fetched_where_the_plugin_can
        arrays_on_the_host_are_seen_in_place;
    dtypes:
        every_type_survives;
    programs:
        one_device
        many_devices
        donation
        what_is_seen_is_not_overwritten
        outputs_are_described
        compile_errors
        run_errors
        wrong_argument_lists
        optimized_program;
    serialized:
        loads_in_a_new_client_on_other_devices
        garbage_is_refused;
    spanning:
        a_plugin_has_it_or_says_what_it_lacks;
    events:
        callbacks_and_futures
        work_under_way_is_waited_for
        more_under_way_than_the_plugin_queues
        a_panicking_callback_does_no_harm
        the_last_handle_may_go_in_a_callback
        calls_from_many_threads;
}
