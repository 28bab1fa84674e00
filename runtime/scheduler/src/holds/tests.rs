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

struct Service {
    holds: Holds,
    view: View,
}

impl Service {
    fn new(slices: u32) -> Service {
        Service {
            holds: Holds::new(slices),
            view: whole(&(0..slices).collect::<Vec<_>>()),
        }
    }

    fn claim(&mut self, wish: Wish, now: u64) -> Claim {
        self.holds.claim(wish, &self.view, now)
    }

    fn release(&mut self, claim: Claim, now: u64) {
        self.holds.release(claim, &self.view, now);
    }

    /// Epoch and slices; `None`: it waits.
    fn held(&self, claim: Claim) -> Option<(u64, Vec<u32>)> {
        match self.holds.get(claim, &self.view).expect("a claim") {
            Hold::Held { epoch, slices, .. } => Some((epoch, slices)),
            Hold::Waiting(_) => None,
        }
    }

    fn epoch(&self, claim: Claim) -> Option<u64> {
        self.held(claim).map(|(epoch, _)| epoch)
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
    service.release(b, 1003);
    assert_eq!(service.holds.get(b, &service.view), None);
    service.release(a, 1004);
    assert_eq!(service.epoch(c), Some(1004));
}

#[test]
fn whoever_wants_all_gets_them_before_their_workers_come() {
    let mut holds = Holds::new(2);
    let nobody = View::default();
    let a = holds.claim(all("a", 0), &nobody, 5);
    assert!(matches!(
        holds.get(a, &nobody),
        Some(Hold::Held { needed: 2, .. })
    ));
}

#[test]
fn epochs_grow_within_a_millisecond_and_when_the_clock_steps_back() {
    let mut service = Service::new(1);
    let a = service.claim(all("a", 0), 1000);
    service.release(a, 1000);
    let b = service.claim(all("b", 0), 1000);
    assert_eq!(service.epoch(b), Some(1001));
    service.release(b, 1000);
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
    service.holds.grant(&service.view, 13);
    assert_eq!(service.held(b), Some((13, vec![0, 3])));
    service.release(a, 14);
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
    service.release(a, 1001);
    let a = service.claim(all("a", 1000), 1002);
    assert_eq!(service.epoch(a), Some(1000));
    // b waits, gets the slice when a's stream breaks, and a comes too late.
    let b = service.claim(all("b", 0), 1003);
    service.release(a, 1004);
    let a = service.claim(all("a", 1000), 1005);
    assert_eq!(service.epoch(b), Some(1004));
    service.release(b, 1006);
    assert_eq!(service.epoch(a), Some(1006));
    // b comes back before its old stream is known to be dead, and before c.
    let mut service = Service::new(1);
    let old = service.claim(all("b", 0), 2000);
    let c = service.claim(all("c", 0), 2001);
    let new = service.claim(all("b", 2000), 2002);
    assert_eq!(service.holds.get(old, &service.view), None);
    assert_eq!(service.epoch(new), Some(2000));
    service.release(old, 2003);
    assert_eq!(service.epoch(new), Some(2000));
    assert_eq!(service.epoch(c), None);
    // A resource manager without memory believes the proxy, and goes on from its epoch.
    let mut anew = Service::new(1);
    let a = anew.claim(all("a", 1006), 500);
    assert_eq!(anew.epoch(a), Some(1006));
    anew.release(a, 501);
    let c = anew.claim(all("c", 0), 502);
    assert_eq!(anew.epoch(c), Some(1007));
}

#[test]
fn slices_that_a_proxy_of_before_serves_itself_of_wait_for_it() {
    let mut anew = Service::new(3);
    anew.view.epochs = [(1, 700), (2, 700)].into();
    let stranger = anew.claim(some("stranger", 2), 1000);
    assert_eq!(anew.held(stranger), None);
    let text = match anew.holds.get(stranger, &anew.view) {
        Some(Hold::Waiting(text)) => text,
        other => panic!("{other:?}"),
    };
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
    anew.holds.grant(&anew.view, 1001);
    assert_eq!(anew.epoch(next), Some(1001));
}
