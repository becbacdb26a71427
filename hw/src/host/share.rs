//! Segments of ranks that are processes of one host.

use super::HostError;
use crate::bootstrap::{Session, fresh_secret};
use crate::transport::segment::{Layout, Segment};
use std::path::Path;
use std::sync::Arc;

/// Makes the own segment as a file in `directory`, best one in memory, and maps those of the ranks that `near` names;
/// all ranks call this together. Once every rank has mapped what it needs the files are removed.
///
/// # Errors
/// [`HostError::Segment`], [`HostError::Peer`].
pub fn share(
    session: &Session,
    layout: &Layout,
    directory: &Path,
    near: impl Fn(usize) -> bool,
) -> Result<Vec<Option<Arc<Segment>>>, HostError> {
    let me = session.place().rank as usize;
    // Rank 0 names the run, so that two runs on a host do not meet.
    let names = session.exchange(&fresh_secret().as_bytes()[..16])?;
    let run = String::from_utf8_lossy(&names[0]).into_owned();
    let path = |rank: usize| directory.join(format!("tilewire-{run}-{rank}"));
    let own = Segment::create(layout, &path(me)).map_err(|error| HostError::Segment { rank: me, error });
    let result = own.and_then(|own| {
        session.barrier()?;
        let own = Arc::new(own);
        let open = |rank: usize| match near(rank) {
            _ if rank == me => Ok(Some(own.clone())),
            true => Segment::open(layout, &path(rank))
                .map(|segment| Some(Arc::new(segment)))
                .map_err(|error| HostError::Segment { rank, error }),
            false => Ok(None),
        };
        let segments = (0..session.place().ranks as usize).map(open).collect::<Result<Vec<_>, _>>()?;
        session.barrier()?;
        Ok(segments)
    });
    let _ = std::fs::remove_file(path(me));
    if let Err(error) = &result {
        session.abort(&error.to_string());
    }
    result
}
