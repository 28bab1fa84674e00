//! Which arrays are being written, so that two saves do not mix their chunks under one name.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An array: the location of its checkpoint, and its name there.
pub(crate) type Name = (String, String);

/// The arrays that saves of this worker are writing.
#[derive(Debug, Default)]
pub(crate) struct Writing(Mutex<HashSet<Name>>);

impl Writing {
    /// Takes all names, until what it gives is dropped.
    ///
    /// # Errors
    /// The first one that another save has. Then none is taken.
    pub(crate) fn take(
        self: &Arc<Self>,
        names: impl IntoIterator<Item = Name>,
    ) -> Result<Taken, Name> {
        let mut taken = Taken {
            home: Arc::clone(self),
            names: Vec::new(),
        };
        for name in names {
            if !self.names().insert(name.clone()) {
                return Err(name);
            }
            taken.names.push(name);
        }
        Ok(taken)
    }

    fn names(&self) -> MutexGuard<'_, HashSet<Name>> {
        // A set is whole after any panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Names that one save has.
#[derive(Debug)]
pub(crate) struct Taken {
    home: Arc<Writing>,
    names: Vec<Name>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut all = self.home.names();
        for name in &self.names {
            all.remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_saves_at_a_time() {
        let writing = Arc::new(Writing::default());
        let name = |name: &str| ("/tmp/1".to_owned(), name.to_owned());
        let first = writing.take([name("a"), name("b")]).unwrap();
        assert_eq!(
            writing.take([name("c"), name("b"), name("d")]).unwrap_err(),
            name("b")
        );
        // What was taken before that one has been given back.
        drop(writing.take([name("c")]).unwrap());
        drop(first);
        drop(writing.take([name("a"), name("b"), name("c")]).unwrap());
    }
}
