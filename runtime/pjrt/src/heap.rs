//! The C heap, which this process shares with its plugin.

/// Gives free pages of the C heap back to the system, as far as its allocator knows how to.
///
/// A CPU plugin takes device memory from the C heap. glibc keeps freed blocks of up to 32 MiB for later use, so a process
/// whose arrays are gone stays as large as it was at its largest. Walks the whole heap: milliseconds, during which other
/// threads may wait to allocate. For calling now and then, after much has been freed. Does nothing with other C libraries.
pub fn release_free_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: the declaration is glibc's (malloc.h); the function takes a number, may be called from any thread at
        // any time, and touches free blocks only.
        unsafe extern "C" {
            safe fn malloc_trim(pad_bytes: usize) -> std::ffi::c_int;
        }
        // Whether anything was given back.
        let _ = malloc_trim(0);
    }
}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    use super::release_free_heap;

    /// Bytes of this process in memory.
    fn resident_bytes() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux has it");
        let pages: usize = statm
            .split(' ')
            .nth(1)
            .expect("second field")
            .parse()
            .expect("a number");
        pages * 4096
    }

    #[test]
    fn free_blocks_between_used_ones_are_given_back() {
        // Below the size from which glibc maps blocks one by one, so that they lie on the heap.
        const BLOCK: usize = 64 << 10;
        let mut blocks: Vec<Vec<u8>> = (0..2048)
            .map(|i| vec![(i % 251) as u8 + 1; BLOCK])
            .collect();
        let full = resident_bytes();
        // Every sixteenth stays, so that the heap cannot just be cut at its end.
        let mut number = 0;
        blocks.retain(|_| {
            number += 1;
            number % 16 == 0
        });
        release_free_heap();
        let after = resident_bytes();
        assert!(after + (64 << 20) < full, "{full} -> {after}");
        assert!(blocks.iter().all(|block| block[0] == block[BLOCK - 1]));
    }
}
