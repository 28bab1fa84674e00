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

/// Memory below this size is left to pages of the usual size.
const LARGE: usize = 1 << 20;

/// Asks the system to back memory by large pages where it has none yet. It may be anybody's: what it holds stays. Pieces of memory
/// that lie side by side can share a large page, when all of them were asked for.
pub(crate) fn prefer_large_pages(start: *mut u8, bytes: usize) {
    if bytes < LARGE {
        return;
    }
    // Advice is for whole pages. The first and the last may be others' as well, who lose nothing by it.
    let page = rustix::param::page_size();
    let before = start.addr() % page;
    let whole = (before + bytes).next_multiple_of(page);
    let first = start.wrapping_sub(before).cast();
    // SAFETY: the advice changes no byte and no right, whatever the range. A system that does not take it says so.
    let _ = unsafe { rustix::mm::madvise(first, whole, rustix::mm::Advice::LinuxHugepage) };
}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    use super::{LARGE, prefer_large_pages, release_free_heap};

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

    /// Whether the mapping that an address lies in is one for large pages.
    fn is_large(start: *const u8) -> bool {
        let all = std::fs::read_to_string("/proc/self/smaps").expect("Linux has it");
        let mut here = false;
        for line in all.lines() {
            let (first, rest) = line.split_once(' ').unwrap_or((line, ""));
            let bounds = first.split_once('-').and_then(|(low, high)| {
                let number = |text| usize::from_str_radix(text, 16).ok();
                Some(number(low)?..number(high)?)
            });
            if let Some(bounds) = bounds {
                here = bounds.contains(&start.addr());
            } else if here && first == "VmFlags:" {
                return rest.split(' ').any(|flag| flag == "hg");
            }
        }
        panic!("the address is not mapped");
    }

    #[test]
    fn large_memory_gets_large_pages() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return;
        }
        // Mapped by themselves.
        let (mut large, mut small) = (vec![0; 64 << 20], vec![0; 64 << 20]);
        prefer_large_pages(large.as_mut_ptr(), LARGE);
        prefer_large_pages(small.as_mut_ptr(), LARGE - 1);
        assert!(is_large(&raw const large[0]) && is_large(&raw const large[LARGE - 1]));
        assert!(!is_large(&raw const large[2 * LARGE]));
        assert!(!is_large(&raw const small[0]));
        assert!(large.iter().chain(&small).all(|byte| *byte == 0));
    }
}
