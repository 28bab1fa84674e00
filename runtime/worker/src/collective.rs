//! Where the plugin and the collectives between workers meet: the FFI target that rewritten programs call.

use bytes::Bytes;
use waystation_collectives::{self as collectives, Member, Op};
use waystation_pjrt::{
    Code,
    ffi::{AsyncTarget, Call, Failure, Outputs},
};

/// The target of all collectives. Its executions' user data is the [`Member`] that they run for.
pub(crate) struct Collective;

/// The memory of a call's results.
struct Results(Outputs);

impl collectives::Outputs for Results {
    fn count(&self) -> usize {
        self.0.count()
    }

    fn get(&mut self, index: usize) -> &mut [u8] {
        self.0.get(index)
    }
}

impl AsyncTarget for Collective {
    fn call(call: Call) {
        let member = call
            .user_data()
            .and_then(|data| data.downcast_ref::<Member>())
            .cloned();
        let op = Op::read(|name| call.attribute(name));
        let (member, op) = match (member, op) {
            (Some(member), Ok(op)) => (member, op),
            (None, _) => {
                return call.finish(Err(Failure::invalid(
                    "a collective between workers was called outside of a launch",
                )));
            }
            (_, Err(wrong)) => return call.finish(Err(Failure::invalid(wrong.to_string()))),
        };
        let (inputs, outputs, promise) = call.into_parts();
        outputs.prefer_large_pages();
        member.start(
            &op,
            collectives::Call {
                inputs: inputs.into_iter().map(Bytes::from_owner).collect(),
                outputs: Box::new(Results(outputs)),
                done: Box::new(|outcome| {
                    promise.finish(outcome.map_err(|failure| {
                        let code = Code::from_number(failure.code().number());
                        Failure::new(code, failure.message())
                    }));
                }),
            },
        );
    }
}
