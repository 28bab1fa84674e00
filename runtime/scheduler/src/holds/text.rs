//! What a proxy that waits is told.

use super::{Entry, Holds, Now, View};

impl Holds {
    /// "waiting for 2 slices of tpuv6e:2x2: proxy a holds 1, 1 free with all workers; place 2 in the queue".
    pub(super) fn waits_for(
        &self,
        entry: &Entry,
        position: usize,
        view: &View,
        now: Now,
    ) -> String {
        let holders = self.queue.iter().filter(|other| other.epoch != 0);
        let mut why: Vec<String> = holders
            .map(|other| {
                let away = match other.broken {
                    Some(_) => " and is not heard of",
                    None => "",
                };
                format!(
                    "proxy {} holds {}{away}",
                    other.wish.proxy,
                    other.slices.len()
                )
            })
            .collect();
        let free = self.free(view);
        let whole = free.iter().filter(|slice| view.whole.contains(slice));
        let whole = whole.count();
        why.push(format!("{whole} free with all workers"));
        let not_there = free.len() - whole;
        if not_there > 0 {
            why.push(format!("{not_there} free without"));
        }
        let is_foreign =
            |(slice, epoch): &(&u32, &u64)| !self.ours.contains(epoch) && !self.is_held(**slice);
        let foreign = view.epochs.iter().filter(is_foreign).count();
        if foreign > 0 {
            why.push(format!("{foreign} kept for a proxy that is to come back"));
        }
        if self.is_anew(view, now) {
            why.push("none given yet, as the resource manager has just started anew".to_owned());
        }
        let before = self.queue.iter().take(position);
        let ahead = before.filter(|other| other.epoch == 0).count();
        let ahead = match ahead {
            0 => String::new(),
            ahead => format!("; place {} in the queue", ahead + 1),
        };
        let wanted = match (entry.wish.slices, self.slices) {
            (None, 1) => "the only slice".to_owned(),
            (None, all) => format!("all {all} slices"),
            (Some(1), _) => "1 slice".to_owned(),
            (Some(wanted), _) => format!("{wanted} slices"),
        };
        let kind = match entry.wish.kind.as_str() {
            "" => String::new(),
            kind => format!(" of {kind}"),
        };
        format!("waiting for {wanted}{kind}: {}{ahead}", why.join(", "))
    }
}
