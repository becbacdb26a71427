//! Counts immediates at the receiver: an arrival word rises when every write of its put has come.

use super::{TransportError, Word};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// What a rank expects from its peers in one run. Proxy threads share it.
#[derive(Debug)]
pub struct Arrivals {
    bank: u32,
    expected: Vec<u32>,
    got: Vec<AtomicU32>,
    /// Puts that have not come whole.
    missing: AtomicUsize,
}

impl Arrivals {
    /// `expected[slot]` writes tell of the put that owns the slot's word; 0 for slots that no put raises.
    pub fn new(bank: u32, expected: Vec<u32>) -> Self {
        let got = expected.iter().map(|_| AtomicU32::new(0)).collect();
        let missing = AtomicUsize::new(expected.iter().filter(|&&writes| writes > 0).count());
        Self { bank, expected, got, missing }
    }

    /// Puts that tell by immediates and have not come whole.
    pub fn missing(&self) -> usize {
        self.missing.load(Ordering::Acquire)
    }

    /// Notes an immediate. True when it was the last of its put, so that the word is to be raised.
    ///
    /// # Errors
    /// [`TransportError::WrongBank`], [`TransportError::Unexpected`].
    pub fn note(&self, word: Word) -> Result<bool, TransportError> {
        let slot = word.slot();
        if word.bank() != self.bank {
            return Err(TransportError::WrongBank { slot, bank: word.bank(), run: self.bank });
        }
        let expected = self.expected.get(slot as usize).copied().unwrap_or(0);
        // Acquires what the threads that saw the other writes of the put saw.
        let got = self.got.get(slot as usize).map_or(1, |got| got.fetch_add(1, Ordering::AcqRel) + 1);
        if got > expected {
            return Err(TransportError::Unexpected { slot, got, expected });
        }
        let whole = got == expected;
        self.missing.fetch_sub(usize::from(whole), Ordering::AcqRel);
        Ok(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_rises_with_the_last_write_of_its_put() {
        let arrivals = Arrivals::new(1, vec![0, 3]);
        let word = Word::new(1, 1);
        let noted: Vec<bool> = (0..3).map(|_| arrivals.note(word).expect("expected")).collect();
        assert_eq!((noted, arrivals.missing()), (vec![false, false, true], 0));
        let error = arrivals.note(word).expect_err("a fourth");
        assert!(matches!(error, TransportError::Unexpected { slot: 1, got: 4, expected: 3 }), "{error}");
    }

    #[test]
    fn words_of_another_run_or_of_no_put_are_errors() {
        let arrivals = Arrivals::new(0, vec![0, 1]);
        let error = arrivals.note(Word::new(1, 1)).expect_err("the other bank");
        assert!(matches!(error, TransportError::WrongBank { slot: 1, bank: 1, run: 0 }), "{error}");
        assert!(matches!(arrivals.note(Word::new(0, 0)), Err(TransportError::Unexpected { expected: 0, .. })));
        assert!(matches!(arrivals.note(Word::new(9, 0)), Err(TransportError::Unexpected { expected: 0, .. })));
    }
}
