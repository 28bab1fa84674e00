//! Saving a piece whose bytes count against the budget.

use std::sync::Arc;

use object_store::PutPayload;

use super::plan::Plan;
use super::saving::Target;
use super::{Elements, SaveArray, Saving};
use crate::engine::{Engine, Room, Term};
use crate::sharding::IndexDomain;
use crate::zarr::PART_BYTES;
use crate::{Error, Result};

impl Saving {
    /// As [`Saving::save`] of one piece without the metadata, for which the caller has taken room
    /// ([`Engine::room_for_piece`]): it is given back when the piece has been written. The parts of a piece that is one chunk ([`SaveArray::cut`]) are let go
    /// of as they are compressed.
    ///
    /// # Errors
    /// As [`Engine::save`].
    pub async fn save_held(
        &self,
        array: &SaveArray,
        domain: &IndexDomain,
        elements: Elements,
        room: Arc<Room>,
    ) -> Result<u64> {
        let plan = Plan::new(self.format(), array, Vec::new(), false)?;
        if domain.is_empty() {
            return Ok(0);
        }
        plan.check(&array.name, domain, elements.len())?;
        let (engine, target) = (&self.engine, self.target(array).await?);
        if plan.stores_as_it_is(domain) {
            let written = engine.write_held(&target, plan, domain, elements, room);
            return written.await;
        }
        let pieces = vec![(domain.clone(), elements.joined())];
        let plan = Plan::new(self.format(), array, pieces, false)?;
        engine.write(target, plan, Some(room)).await
    }
}

impl Engine {
    /// As [`Saving::save_held`], as a save of its own.
    ///
    /// # Errors
    /// As [`Saving::save_held`].
    pub async fn save_held(
        &self,
        array: &SaveArray,
        domain: &IndexDomain,
        elements: Elements,
        room: Arc<Room>,
    ) -> Result<u64> {
        let saving = self.saving();
        let bytes = saving.save_held(array, domain, elements, room).await?;
        saving.finish().await?;
        Ok(bytes)
    }

    async fn write_held(
        &self,
        target: &Target,
        plan: Plan,
        domain: &IndexDomain,
        elements: Elements,
        room: Arc<Room>,
    ) -> Result<u64> {
        let folder = &target.folder;
        let chunk = plan.metadata.grid.chunks_of(domain).next();
        let file = plan.metadata.keys.key(&chunk.unwrap_or_default());
        let codec = plan.metadata.codec;
        let bytes = codec.bound(elements.len());
        let scratch = self.scratch(elements.largest() + PART_BYTES).await;
        let encoded = {
            // Held by the work too, which goes on when this future is dropped.
            let (engine, room) = (self.clone(), Arc::clone(&room));
            self.compute(move || {
                let _held = (scratch, room);
                let buffer = |len| engine.buffer(len, Term::Passing);
                let parts = codec.encode_parts(elements.into_parts(), &buffer).ok()?;
                Some(plan.payload(parts))
            })
            .await
        };
        let encoded: Option<PutPayload> =
            encoded.map_err(|source| folder.cut_off("compressing", &file, source))?;
        let encoded = encoded.ok_or_else(|| Error::OutOfMemory {
            array: folder.array(),
            bytes,
            purpose: "compressing a chunk",
        })?;
        target.put(self, &file, encoded).await
    }
}
