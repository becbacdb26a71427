//! One run at a time writes to an output directory.

use crate::error::ExperimentError;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

/// Name of the file that the kernel holds locked for a run; one that a dead run has left is free.
const NAME: &str = ".tilewire.lock";

/// An output directory that belongs to this run.
#[derive(Debug)]
pub struct Lock {
    file: PathBuf,
    /// Directories that were made for it, outermost first.
    made: Vec<PathBuf>,
    /// Locked until it is dropped.
    _held: File,
}

impl Lock {
    /// Takes a directory, which is made if it is not there.
    ///
    /// # Errors
    /// [`ExperimentError::Refused`] while another run has it, [`ExperimentError::Write`].
    pub fn take(root: &Path) -> Result<Self, ExperimentError> {
        let failed = |error: std::io::Error| ExperimentError::write(root, error);
        let made = root.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let made: Vec<PathBuf> = made.map(Path::to_owned).collect();
        fs::create_dir_all(root).map_err(failed)?;
        let file = root.join(NAME);
        loop {
            let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&file);
            let mut held = open.map_err(failed)?;
            match held.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let mut process = String::new();
                    let _ = held.read_to_string(&mut process);
                    let problem =
                        format!("process {} writes there now; choose another directory with -o", process.trim());
                    return Err(ExperimentError::refused(root.display().to_string(), problem));
                }
                Err(TryLockError::Error(error)) => return Err(failed(error)),
            }
            // Whoever had it may have removed it between the two calls; then this is a file that nobody else sees.
            if !is_there(&held, &file) {
                continue;
            }
            held.set_len(0).and_then(|()| held.rewind()).map_err(failed)?;
            writeln!(held, "{}", std::process::id()).map_err(failed)?;
            return Ok(Self { file, made, _held: held });
        }
    }
}

fn is_there(held: &File, file: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let same = |a: fs::Metadata, b: fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    held.metadata().and_then(|mine| Ok(same(mine, fs::metadata(file)?))).unwrap_or(false)
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.file);
        // Directories in which nothing was written leave no trace.
        for path in &self.made {
            let _ = fs::remove_dir(path);
        }
    }
}

/// Cuts a last row that a run which was killed has written in part, and says so.
///
/// # Errors
/// [`ExperimentError::Write`].
pub fn drop_torn_row(file: &Path) -> Result<(), ExperimentError> {
    let Ok(text) = fs::read(file) else { return Ok(()) };
    if text.is_empty() || text.ends_with(b"\n") {
        return Ok(());
    }
    let failed = |error: std::io::Error| ExperimentError::write(file, error);
    let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    eprintln!("{}: the last row is not whole, a run was ended while it wrote; dropped", file.display());
    if whole == 0 {
        return fs::remove_file(file).map_err(failed);
    }
    OpenOptions::new().write(true).open(file).and_then(|rows| rows.set_len(whole as u64)).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_owner_and_a_dead_one_s_file_is_free() {
        let root = tempfile::tempdir().expect("a directory");
        let output = root.path().join("a/b");
        let lock = Lock::take(&output).expect("free");
        let error = Lock::take(&output).expect_err("taken");
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        assert!(text.contains(&format!("process {} writes there now", std::process::id())), "{text}");
        drop(lock);
        assert!(!root.path().join("a").exists(), "nothing was written");
        fs::create_dir_all(&output).expect("writable");
        fs::write(output.join(NAME), "4242\n").expect("writable");
        drop(Lock::take(&output).expect("its run is dead"));
        assert_eq!(fs::read_dir(&output).expect("not made by a run").count(), 0);
    }

    #[test]
    fn only_a_row_that_is_not_whole_is_dropped() {
        let root = tempfile::tempdir().expect("a directory");
        let file = root.path().join("rows.csv");
        for (before, after) in [("a,b\n1,2\n3", Some("a,b\n1,2\n")), ("a,b\n1,2\n", Some("a,b\n1,2\n")), ("a,", None)] {
            fs::write(&file, before).expect("writable");
            drop_torn_row(&file).expect("writable");
            assert_eq!(fs::read_to_string(&file).ok().as_deref(), after);
        }
        drop_torn_row(&file).expect("no file, no row");
    }
}
