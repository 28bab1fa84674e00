//! Who gets slices, and when.

use super::*;

fn all(proxy: &str, resume: u64) -> Wish {
    Wish {
        proxy: proxy.to_owned(),
        resume,
        ..Wish::default()
    }
}

fn some(proxy: &str, slices: u32) -> Wish {
    Wish {
        slices: Some(slices),
        ..all(proxy, 0)
    }
}

fn whole(slices: &[u32]) -> View {
    View {
        whole: slices.to_vec(),
        ..View::default()
    }
}

const LEASE: u64 = 10_000;

/// The resource manager has started at 0, by a clock that may be set.
struct Service {
    holds: Holds,
    view: View,
    /// Unix time of its start.
    started: u64,
}

impl Service {
    /// One that is old enough to know all that had slices before.
    fn new(slices: u32) -> Service {
        Service {
            holds: Holds::new(slices, Duration::ZERO),
            ..Service::young(slices)
        }
    }

    fn young(slices: u32) -> Service {
        Service {
            holds: Holds::new(slices, Duration::from_millis(LEASE)),
            view: whole(&(0..slices).collect::<Vec<_>>()),
            started: 0,
        }
    }

    fn at(&self, now: u64) -> Now {
        Now {
            unix_ms: now,
            up: Duration::from_millis(now.saturating_sub(self.started)),
        }
    }

    fn claim(&mut self, wish: Wish, now: u64) -> Claim {
        let now = self.at(now);
        self.holds.claim(wish, &self.view, now)
    }

    /// Its stream ends.
    fn broke(&mut self, claim: Claim, now: u64) {
        let now = self.at(now);
        self.holds.broke(claim, &self.view, now);
    }

    fn give_back(&mut self, instance: u64, now: u64) {
        let now = self.at(now);
        self.holds.give_back(instance, &self.view, now);
    }

    /// The only worker of each of these slices is there, serves an epoch, and has served another at most.
    fn says(&mut self, workers: &[(u32, u64, u64)]) {
        self.view.workers.clear();
        self.view.epochs.clear();
        self.view.last.clear();
        for &(slice, serves, last) in workers {
            let place = Place { slice, task: 0 };
            self.view.workers.insert(place, Says { serves, last });
            if serves != 0 {
                self.view.epochs.insert(slice, serves);
            }
            if last != 0 {
                self.view.last.insert(slice, last);
            }
        }
    }

    /// Something has changed, or time has passed.
    fn grant(&mut self, now: u64) {
        let now = self.at(now);
        self.holds.grant(&self.view, now);
    }

    /// Epoch and slices; `None`: it waits.
    fn held(&self, claim: Claim) -> Option<(u64, Vec<u32>)> {
        match self.hold(claim).expect("a claim").1 {
            Hold::Held { epoch, slices, .. } => Some((epoch, slices)),
            Hold::Expecting | Hold::Waiting(_) => None,
        }
    }

    fn hold(&self, claim: Claim) -> Option<(u64, Hold)> {
        self.holds.get(claim, &self.view, self.at(1))
    }

    fn epoch(&self, claim: Claim) -> Option<u64> {
        self.held(claim).map(|(epoch, _)| epoch)
    }

    fn text(&self, claim: Claim) -> String {
        match self.hold(claim) {
            Some((_, Hold::Waiting(text))) => text,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn one_proxy_holds_all_and_the_others_wait_in_order() {
    let mut service = Service::new(1);
    let a = service.claim(all("a", 0), 1000);
    let b = service.claim(all("b", 0), 1001);
    let c = service.claim(all("c", 0), 1002);
    assert_eq!(service.epoch(a), Some(1000));
    assert_eq!((service.epoch(b), service.epoch(c)), (None, None));
    service.broke(b, 1003);
    assert_eq!(service.hold(b), None);
    service.broke(a, 1004);
    assert_eq!(service.epoch(c), Some(1004));
}

#[test]
fn whoever_wants_all_gets_them_before_their_workers_come() {
    let mut service = Service::new(2);
    service.view = View::default();
    let a = service.claim(all("a", 0), 5);
    assert!(matches!(
        service.hold(a),
        Some((_, Hold::Held { needed: 2, .. }))
    ));
}

#[test]
fn epochs_grow_within_a_millisecond_and_when_the_clock_steps_back() {
    let mut service = Service::new(1);
    let a = service.claim(all("a", 0), 1000);
    service.broke(a, 1000);
    let b = service.claim(all("b", 0), 1000);
    assert_eq!(service.epoch(b), Some(1001));
    service.broke(b, 1000);
    let c = service.claim(all("c", 0), 5);
    assert_eq!(service.epoch(c), Some(1002));
}

#[test]
fn slices_are_given_whole_ones_first_and_never_twice() {
    let mut service = Service::new(4);
    service.view = whole(&[1, 2, 3]);
    let a = service.claim(some("a", 2), 10);
    assert_eq!(service.held(a), Some((10, vec![1, 2])));
    let b = service.claim(some("b", 2), 11);
    assert_eq!(service.held(b), None, "slice 0 is not there");
    let c = service.claim(some("c", 1), 12);
    assert_eq!(service.held(c), None, "b came first");
    service.view = whole(&[0, 1, 2, 3]);
    service.grant(13);
    assert_eq!(service.held(b), Some((13, vec![0, 3])));
    service.broke(a, 14);
    assert_eq!(service.held(c), Some((14, vec![1])));
    assert_eq!(service.held(b), Some((13, vec![0, 3])));
}

#[test]
fn elastic_proxies_take_slices_that_are_not_there_but_one() {
    let mut service = Service::new(3);
    service.view = whole(&[2]);
    let wish = Wish {
        elastic: 5,
        ..some("a", 2)
    };
    let a = service.claim(wish.clone(), 10);
    assert_eq!(service.held(a), Some((10, vec![0, 2])));
    let b = service.claim(wish, 11);
    assert_eq!(
        service.held(b),
        None,
        "one must be there, and there are not enough"
    );
}

#[test]
fn a_proxy_goes_on_with_its_epoch_unless_another_had_the_slices() {
    let mut service = Service::new(1);
    let a = service.claim(all("a", 0), 1000);
    service.broke(a, 1001);
    let a = service.claim(all("a", 1000), 1002);
    assert_eq!(service.epoch(a), Some(1000));
    // b waits, gets the slice when a's stream breaks, and a comes too late.
    let b = service.claim(all("b", 0), 1003);
    service.broke(a, 1004);
    let a = service.claim(all("a", 1000), 1005);
    assert_eq!(service.epoch(b), Some(1004));
    service.broke(b, 1006);
    assert_eq!(service.epoch(a), Some(1006));
    // b comes back before its old stream is known to be dead, and before c.
    let mut service = Service::new(1);
    let old = service.claim(all("b", 0), 2000);
    let c = service.claim(all("c", 0), 2001);
    let new = service.claim(all("b", 2000), 2002);
    assert_eq!(service.hold(old), None);
    assert_eq!(service.epoch(new), Some(2000));
    service.broke(old, 2003);
    assert_eq!(service.epoch(new), Some(2000));
    assert_eq!(service.epoch(c), None);
    // A resource manager without memory believes the proxy, and goes on from its epoch.
    let mut anew = Service::new(1);
    let a = anew.claim(all("a", 1006), 500);
    assert_eq!(anew.epoch(a), Some(1006));
    anew.broke(a, 501);
    let c = anew.claim(all("c", 0), 502);
    assert_eq!(anew.epoch(c), Some(1007));
}

#[test]
fn slices_that_a_proxy_of_before_serves_itself_of_wait_for_it() {
    let mut anew = Service::new(3);
    anew.view.epochs = [(1, 700), (2, 700)].into();
    let stranger = anew.claim(some("stranger", 2), 1000);
    assert_eq!(anew.held(stranger), None);
    let text = anew.text(stranger);
    assert!(
        text.contains("2 kept for a proxy that is to come back"),
        "{text}"
    );
    let wish = Wish {
        resume: 700,
        resume_slices: vec![1, 2],
        ..some("back", 2)
    };
    let back = anew.claim(wish, 1002);
    assert_eq!(
        anew.held(back),
        Some((700, vec![1, 2])),
        "before the stranger"
    );
    assert_eq!(anew.held(stranger), None);
    // When the workers serve nobody any more, all are free.
    let mut anew = Service::new(1);
    anew.view.epochs = [(0, 700)].into();
    let next = anew.claim(all("next", 0), 1000);
    assert_eq!(anew.epoch(next), None);
    anew.view.epochs.clear();
    anew.grant(1001);
    assert_eq!(anew.epoch(next), Some(1001));
}

fn of(instance: u64, wish: Wish) -> Wish {
    Wish { instance, ..wish }
}

/// As a proxy asks again after its stream broke.
fn again(wish: &Wish, hold: Option<(u64, Hold)>) -> Wish {
    let (ticket, hold) = hold.expect("a claim");
    let (resume, resume_slices) = match hold {
        Hold::Held { epoch, slices, .. } => (epoch, slices),
        Hold::Expecting | Hold::Waiting(_) => (0, Vec::new()),
    };
    Wish {
        ticket,
        resume,
        resume_slices,
        ..wish.clone()
    }
}

#[test]
fn slices_are_kept_for_a_lease_when_a_stream_breaks_and_not_after_a_goodbye() {
    let mut service = Service::young(1);
    let asks = of(1, all("a", 0));
    let a = service.claim(asks.clone(), 20_000);
    let had = service.hold(a);
    let b = service.claim(of(2, all("b", 0)), 20_001);
    service.broke(a, 21_000);
    assert_eq!(service.epoch(b), None);
    assert!(
        service
            .text(b)
            .contains("proxy a holds 1 and is not heard of")
    );
    assert_eq!(
        service.holds.next_change(service.at(21_000)),
        Some(Duration::from_millis(21_000 + LEASE))
    );
    // Back in time: as if nothing had been, whatever has come to light meanwhile.
    service.grant(21_000 + LEASE - 1);
    let a = service.claim(again(&asks, had.clone()), 21_000 + LEASE - 1);
    assert_eq!(service.epoch(a), Some(20_000));
    assert_eq!(service.holds.next_change(service.at(21_000 + LEASE)), None);
    service.grant(1_000_000);
    assert_eq!(service.epoch(b), None);
    // Too late: the slice is another's, and the proxy waits behind those that came meanwhile.
    service.broke(a, 2_000_000);
    let c = service.claim(of(3, all("c", 0)), 2_000_001);
    service.grant(2_000_000 + LEASE);
    assert_eq!(service.epoch(b), Some(2_000_000 + LEASE));
    let a = service.claim(again(&asks, had), 3_000_000);
    assert_eq!(service.epoch(a), None);
    // Goodbyes.
    service.give_back(2, 3_000_001);
    assert_eq!((service.epoch(c), service.hold(b)), (Some(3_000_001), None));
    service.give_back(3, 3_000_002);
    assert_eq!(service.epoch(a), Some(3_000_002));
}

#[test]
fn a_proxy_whose_workers_serve_it_no_more_is_dead() {
    let mut service = Service::young(2);
    let a = service.claim(of(1, all("a", 0)), 20_000);
    let b = service.claim(of(2, all("b", 0)), 20_001);
    // Its workers have not heard of it yet when the stream breaks: that says nothing.
    service.broke(a, 20_002);
    service.grant(20_003);
    assert_eq!(service.epoch(b), None);
    service.says(&[(0, 20_000, 20_000), (1, 20_000, 20_000)]);
    service.grant(20_004);
    service.says(&[(0, 0, 20_000), (1, 20_000, 20_000)]);
    service.grant(20_005);
    assert_eq!(service.epoch(b), None, "one still serves it");
    service.says(&[(0, 0, 20_000)]);
    service.grant(20_006);
    assert_eq!(service.epoch(b), None, "one is gone, and does not say why");
    service.says(&[(0, 0, 20_000), (1, 0, 0)]);
    service.grant(20_007);
    assert_eq!(service.epoch(b), None, "one is another, and knows nothing");
    service.says(&[(0, 0, 20_000), (1, 0, 20_000)]);
    service.grant(20_008);
    assert_eq!(service.epoch(b), Some(20_008));
}

#[test]
fn a_proxy_whose_workers_are_gone_keeps_its_slices_for_a_lease() {
    let mut service = Service::young(1);
    let a = service.claim(of(1, all("a", 0)), 20_000);
    service.says(&[(0, 20_000, 20_000)]);
    service.grant(20_001);
    let b = service.claim(of(2, all("b", 0)), 20_002);
    service.broke(a, 20_003);
    service.says(&[]);
    service.grant(20_004);
    assert_eq!(service.epoch(b), None);
    service.grant(20_003 + LEASE);
    assert_eq!(service.epoch(b), Some(20_003 + LEASE));
}

#[test]
fn workers_that_went_before_their_proxy_do_not_keep_its_slices() {
    let mut service = Service::young(2);
    let a = service.claim(of(1, all("a", 0)), 20_000);
    let b = service.claim(of(2, all("b", 0)), 20_001);
    service.says(&[(0, 20_000, 20_000), (1, 20_000, 20_000)]);
    service.grant(20_002);
    service.says(&[(0, 20_000, 20_000)]);
    service.grant(20_003);
    service.broke(a, 20_004);
    assert_eq!(service.epoch(b), None);
    service.says(&[(0, 0, 20_000)]);
    service.grant(20_005);
    assert_eq!(service.epoch(b), Some(20_005));
}

#[test]
fn a_resource_manager_that_starts_anew_gives_nothing_to_strangers_for_a_lease() {
    // Before the restart a has the slice, and b and c wait.
    let mut before = Service::young(1);
    let wishes = [1, 2, 3].map(|n| of(n, all(&format!("p{n}"), 0)));
    let claims = wishes.clone().map(|wish| before.claim(wish, 20_000));
    let [a, b, c] = [0, 1, 2].map(|n| again(&wishes[n], before.hold(claims[n])));
    assert_eq!((a.resume, b.resume), (20_000, 0));

    // They come in any order, to one whose clock is behind, and before the workers.
    let anew = || Service {
        view: View::default(),
        ..Service::young(1)
    };
    let mut manager = anew();
    let new_c = manager.claim(c.clone(), 1);
    let new_b = manager.claim(b.clone(), 2);
    manager.view = View {
        last: [(0, 20_000)].into(),
        again: true,
        ..whole(&[0])
    };
    manager.grant(3);
    assert_eq!((manager.epoch(new_b), manager.epoch(new_c)), (None, None));
    assert!(manager.text(new_b).contains("just started anew"));
    let new_a = manager.claim(a.clone(), 4);
    assert_eq!(manager.epoch(new_a), Some(20_000));
    manager.give_back(1, 5);
    assert_eq!((manager.epoch(new_b), manager.epoch(new_c)), (None, None));
    // The queue is as it was, and epochs go on growing.
    manager.grant(LEASE);
    assert_eq!(manager.epoch(new_b), Some(20_001));

    // Without a, a lease later.
    let mut manager = anew();
    let new_b = manager.claim(b, 1);
    manager.view = whole(&[0]);
    manager.grant(LEASE - 1);
    assert_eq!(manager.epoch(new_b), None);
    manager.grant(LEASE);
    assert_eq!(manager.epoch(new_b), Some(LEASE));
    // It comes too late.
    let new_a = manager.claim(Wish { resume: 5, ..a }, LEASE + 1);
    assert_eq!(manager.epoch(new_a), None);
}

#[test]
fn the_first_resource_manager_does_not_keep_anybody_waiting() {
    let mut manager = Service {
        view: View::default(),
        ..Service::young(2)
    };
    let a = manager.claim(of(1, all("a", 0)), 1);
    assert_eq!(manager.hold(a).map(|(_, hold)| hold), Some(Hold::Expecting));
    manager.view = whole(&[1]);
    manager.grant(2);
    assert_eq!(manager.epoch(a), None, "slice 0 may be somebody's");
    manager.view = whole(&[0, 1]);
    manager.grant(3);
    assert_eq!(manager.epoch(a), Some(3));
}

#[test]
fn a_proxy_is_in_the_queue_once_and_keeps_its_place() {
    let mut service = Service::new(1);
    let a = service.claim(of(1, all("a", 0)), 1000);
    let asks = of(2, all("b", 0));
    let old = service.claim(asks.clone(), 1001);
    let c = service.claim(of(3, all("c", 0)), 1002);
    assert!(service.text(c).ends_with("; place 2 in the queue"));
    // Its old stream is not known to be dead.
    let had = service.hold(old);
    let b = service.claim(again(&asks, had.clone()), 1003);
    assert_eq!(service.hold(old), None);
    service.broke(old, 1004);
    // It is known, and the proxy comes a little later.
    service.broke(b, 1005);
    let b = service.claim(again(&asks, had), 1006);
    assert!(service.text(c).ends_with("; place 2 in the queue"));
    service.broke(a, 1007);
    assert_eq!((service.epoch(b), service.epoch(c)), (Some(1007), None));
}

#[test]
fn workers_that_have_served_more_are_served_anew() {
    let mut service = Service::new(1);
    let a = service.claim(of(1, all("a", 0)), 1000);
    // The resource manager before this one had another clock.
    service.view.last = [(0, 5000)].into();
    service.grant(1001);
    assert_eq!(service.epoch(a), Some(5001));
    service.view.last = [(0, 5001)].into();
    service.grant(1002);
    assert_eq!(service.epoch(a), Some(5001));
}

#[test]
fn of_two_proxies_that_had_the_same_slices_the_later_one_has_them() {
    // A resource manager of before gave the slices to a, then, when a had been away for too long, to b.
    let anew = || Service {
        view: View::default(),
        ..Service::young(2)
    };
    let asks = |instance, name: &str, epoch| Wish {
        ticket: epoch,
        ..of(instance, all(name, epoch))
    };
    let (a, b) = (|| asks(1, "a", 1000), || asks(2, "b", 2000));
    let workers = || View {
        epochs: [(0, 2000), (1, 2000)].into(),
        last: [(0, 2000), (1, 2000)].into(),
        again: true,
        ..whole(&[0, 1])
    };
    // Its workers come after a, and before b.
    let mut manager = anew();
    let old = manager.claim(a(), 1);
    assert_eq!(manager.epoch(old), Some(1000), "nobody knows better");
    let waits = manager.claim(asks(3, "waits", 0), 2);
    manager.view = workers();
    manager.grant(3);
    assert_eq!((manager.epoch(old), manager.epoch(waits)), (None, None));
    assert!(manager.text(old).ends_with("; place 2 in the queue"));
    let new = manager.claim(b(), 4);
    assert_eq!(manager.epoch(new), Some(2000));
    // b comes before the workers.
    let mut manager = anew();
    let old = manager.claim(a(), 1);
    let new = manager.claim(b(), 2);
    assert_eq!((manager.epoch(old), manager.epoch(new)), (None, Some(2000)));
    manager.view = workers();
    manager.grant(3);
    assert_eq!((manager.epoch(old), manager.epoch(new)), (None, Some(2000)));
    // One whose stream has broken is out of the queue.
    let mut manager = anew();
    let old = manager.claim(a(), 1);
    manager.broke(old, 2);
    manager.view = workers();
    manager.grant(3);
    assert_eq!(manager.hold(old), None);
    // What this resource manager has given is not taken back.
    let mut manager = anew();
    let given = manager.claim(asks(1, "a", 0), LEASE);
    assert_eq!(manager.epoch(given), Some(LEASE));
    let late = manager.claim(asks(2, "b", 2 * LEASE), LEASE + 1);
    assert_eq!(manager.epoch(given), Some(LEASE));
    assert_eq!(manager.epoch(late), None);
}

#[test]
fn who_waits_is_told_for_what() {
    let mut service = Service::new(4);
    service.view = whole(&[0, 1, 2]);
    let one = service.claim(some("one", 2), 10);
    assert!(service.held(one).is_some());
    let kind = "tpuv6e:2x2".to_owned();
    let two = service.claim(
        Wish {
            kind,
            ..some("two", 3)
        },
        11,
    );
    assert_eq!(
        service.text(two),
        "waiting for 3 slices of tpuv6e:2x2: proxy one holds 2, 1 free with all workers, 1 free without"
    );
    let three = service.claim(all("three", 0), 12);
    assert_eq!(
        service.text(three),
        "waiting for all 4 slices: proxy one holds 2, 1 free with all workers, 1 free without; place 2 in the queue"
    );
}
