//! Bytes to entry, believing none of them.

use super::*;

/// No entry has more rows in its table than there are kinds.
const MAX_SECTIONS: u32 = 5;

/// Reads an entry. Takes time in proportion to it (hashing and decompression: about a millisecond a megabyte), so above
/// a few hundred kilobytes it belongs onto a thread that may block.
///
/// # Errors
/// [`Bad`] for anything that is not, to the last bit, an entry of this format, of this key and within the limits.
pub fn open(key: &Digest, object: &Bytes, limits: &Limits) -> Result<Opened, Bad> {
    open_signed(key, object, limits, None)
}

/// [`open`], where entries have to be signed with a key if one is given.
///
/// # Errors
/// As [`open`], and [`Bad::Signature`].
pub fn open_signed(
    key: &Digest,
    object: &Bytes,
    limits: &Limits,
    signing: Option<&SigningKey>,
) -> Result<Opened, Bad> {
    let actual = object.len() as u64;
    if actual > limits.object {
        return Err(Bad::TooLarge {
            bytes: actual,
            limit: limits.object,
        });
    }
    // The magic is looked at before the length, so that a foreign file of any size is called one.
    let mut reader = Reader(object);
    let seen = object.len().min(MAGIC.len());
    if object[..seen] != MAGIC[..seen] {
        return Err(Bad::Foreign);
    }
    if object.len() < HEADER_BYTES + CHECKSUM_BYTES {
        return Err(Bad::TooShort { bytes: actual });
    }
    reader.skip(MAGIC.len());
    let format = reader.u32();
    if format != FORMAT {
        return Err(Bad::UnknownFormat { found: format });
    }
    let count = reader.u32();
    let stated = reader.u64();
    if stated != actual {
        return Err(Bad::Length { stated, actual });
    }
    let (covered, checksum) = object.split_at(object.len() - CHECKSUM_BYTES);
    let computed: Digest = Sha256::digest(covered).into();
    if computed != checksum {
        return Err(Bad::Checksum);
    }
    let found = reader.digest();
    if found != *key {
        return Err(Bad::WrongKey { found });
    }
    let sections = sections(object, count, limits)?;
    if let Some(signing) = signing {
        let last = sections.last();
        let Some(signature) = last.filter(|section| section.kind == Kind::Signature) else {
            return Err(Bad::Signature("is not signed"));
        };
        // The sections fill the object, so this is where the last of them begins.
        let (message, _) = covered.split_at(covered.len() - signature.packed.stored.len());
        if !signing.verifies(message, &signature.packed.stored) {
            return Err(Bad::Signature("is signed with another key"));
        }
    }
    assemble(&sections, actual, computed)
}

/// The length that an object's first bytes say it has; `None` where they are no entry's.
pub(crate) fn stated_length(first: &[u8]) -> Option<u64> {
    let length = first.get(16..24)?;
    first.starts_with(&MAGIC).then(|| Reader(length).u64())
}

/// How many bytes an object says that opening it makes of it. Looks at nothing but its table, which may lie.
pub(crate) fn stated_bytes(object: &[u8]) -> u64 {
    let rows = object.get(HEADER_BYTES..).unwrap_or_default();
    let rows = rows.chunks_exact(ROW_BYTES).take(MAX_SECTIONS as usize);
    let count = object.get(12..16).map_or(0, |bytes| Reader(bytes).u32());
    let decoded = rows.take(count as usize).map(|row| {
        let mut row = Reader(row);
        let kind = Kind::of(row.u32());
        row.skip(12);
        match kind {
            // Stays as it is.
            Some(Kind::Text) | None => 0,
            Some(_) => row.u64(),
        }
    });
    decoded.fold(0, u64::saturating_add)
}

/// A section that lies within the object.
struct Section {
    kind: Kind,
    packed: Packed,
}

/// Reads the table and cuts the sections out; they must fill the object exactly.
fn sections(object: &Bytes, count: u32, limits: &Limits) -> Result<Vec<Section>, Bad> {
    if count > MAX_SECTIONS {
        return Err(Bad::Table("more sections than there are kinds"));
    }
    let rows = count as usize * ROW_BYTES;
    let end = object.len() - CHECKSUM_BYTES;
    if end - HEADER_BYTES < rows {
        return Err(Bad::Table("it is longer than the object"));
    }
    let mut table = Reader(&object[HEADER_BYTES..HEADER_BYTES + rows]);
    let mut at = HEADER_BYTES + rows;
    let mut sections: Vec<Section> = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let kind = Kind::of(table.u32()).ok_or(Bad::Table("unknown kind of section"))?;
        let encoding = table.u32();
        let stored_bytes = table.u64();
        let decoded_bytes = table.u64();
        if sections.last().is_some_and(|last| last.kind >= kind) {
            return Err(Bad::Table("kinds are not ascending"));
        }
        if stored_bytes > (end - at) as u64 {
            return Err(Bad::Table("a section ends outside the object"));
        }
        let limit = kind.limit(limits);
        if decoded_bytes > limit {
            return Err(Bad::SectionTooLarge {
                section: kind.name(),
                bytes: decoded_bytes,
                limit,
            });
        }
        // Fits: it is not more than the rest of a slice.
        let next = at + stored_bytes as usize;
        sections.push(Section {
            kind,
            packed: Packed {
                encoding,
                stored: object.slice(at..next),
                decoded_bytes,
            },
        });
        at = next;
    }
    if at != end {
        return Err(Bad::Table("bytes lie outside all sections"));
    }
    Ok(sections)
}

fn assemble(sections: &[Section], stored_bytes: u64, checksum: Digest) -> Result<Opened, Bad> {
    let find = |kind| sections.iter().find(|section| section.kind == kind);
    let required = |kind: Kind| {
        find(kind)
            .ok_or(Bad::Table("a section is missing"))
            .and_then(Section::decode)
    };
    let malformed = |kind: Kind, reason: String| Bad::Section {
        section: kind.name(),
        reason,
    };
    let provenance = serde_json::from_slice(&required(Kind::Provenance)?)
        .map_err(|error| malformed(Kind::Provenance, error.to_string()))?;
    let info = Message::decode(required(Kind::Info)?)
        .map_err(|error| malformed(Kind::Info, error.to_string()))?;
    let executable = required(Kind::Executable)?;
    if executable.is_empty() {
        return Err(malformed(Kind::Executable, "it is empty".to_owned()));
    }
    let text = match find(Kind::Text) {
        None => None,
        Some(Section { packed, .. }) => {
            let checked = packed.check();
            checked.map_err(|reason| malformed(Kind::Text, reason))?;
            // A slice would keep the whole object.
            let stored = Bytes::copy_from_slice(&packed.stored);
            Some(Text(Packed { stored, ..*packed }))
        }
    };
    Ok(Opened {
        entry: Entry {
            info,
            executable,
            text,
            object: Some(checksum),
        },
        provenance,
        stored_bytes,
        checksum,
    })
}

impl Section {
    /// The decoded bytes, whose number [`sections`] has compared with the limit.
    fn decode(&self) -> Result<Bytes, Bad> {
        self.packed.decode().map_err(|reason| Bad::Section {
            section: self.kind.name(),
            reason,
        })
    }
}

/// Reads integers off a slice whose length has been checked.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn skip(&mut self, bytes: usize) {
        self.0 = self.0.get(bytes..).unwrap_or_default();
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk() {
            Some((chunk, rest)) => {
                self.0 = rest;
                *chunk
            }
            // Not reached, since callers check lengths first; zeros are refused by every caller's own checks.
            None => [0; N],
        }
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    fn digest(&mut self) -> Digest {
        self.take()
    }
}
