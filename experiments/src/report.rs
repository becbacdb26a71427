//! `report`: an output directory as one self-contained HTML page.
//!
//! ```text
//!  DIR, all below   every folder with a run.toml becomes a section, in the order of paths
//!   ├ run.toml      command, seed, machines, assumed parameters
//!   ├ *.svg         in the page as they are
//!   └ *.csv         as tables, long ones cut
//! ```
//!
//! The page holds nothing but what the files say: the same directory gives the same bytes.

use crate::cli::ReportArgs;
use crate::data::{Sheet, read_text};
use crate::error::ExperimentError;
use crate::provenance::{SCHEMA, make_folder_of};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// Rows of a table in the page at most.
const SHOWN: usize = 100;

/// Folders that are looked through at most: a directory with more is none that was written for a page.
const MAX_FOLDERS: usize = 10_000;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}\
h1,h2,h3{line-height:1.2}h2{border-top:2px solid #ccc;padding-top:1rem;margin-top:3rem}\
svg{max-width:100%;height:auto}.wide{overflow-x:auto}\
table{border-collapse:collapse;font:12px/1.4 ui-monospace,monospace}td,th{padding:.15rem .6rem;border-bottom:1px solid #ddd;\
text-align:left;white-space:nowrap}td.n{text-align:right}dt{font-weight:600}dd{margin:0 0 .4rem 1.5rem}";

/// One folder with a `run.toml`.
struct Section {
    name: String,
    folder: PathBuf,
    manifest: toml::Table,
}

/// Runs the command; returns what it prints.
///
/// # Errors
/// [`ExperimentError`] when the directory holds no output of tilewire, or a file of it cannot be read.
pub fn run(args: &ReportArgs) -> Result<String, ExperimentError> {
    let sections = sections(&args.folder)?;
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><meta charset=\"utf-8\"><title>tilewire: {0}</title>\n<style>{STYLE}</style>\n\
         <h1>{0}</h1>\n",
        escaped(&args.folder.display().to_string())
    );
    if sections.len() > 1 {
        page += "<ul>\n";
        for section in &sections {
            let name = escaped(&section.name);
            let _ = writeln!(page, "<li><a href=\"#{name}\">{name}</a></li>");
        }
        page += "</ul>\n";
    }
    for section in &sections {
        page += &section.html()?;
    }
    page += "</html>\n";
    let path = args.output.clone().unwrap_or_else(|| args.folder.join("report.html"));
    if path.extension().is_none_or(|extension| extension != "html") {
        return Err(ExperimentError::refused("-o", format!("{}, allowed: a name that ends in .html", path.display())));
    }
    make_folder_of(&path)?;
    fs::write(&path, &page).map_err(|error| ExperimentError::write(&path, error))?;
    let names: Vec<&str> = sections.iter().map(|section| section.name.as_str()).collect();
    Ok(format!("{} sections: {}\nwrote {}\n", names.len(), names.join(", "), path.display()))
}

/// The folders of tilewire's output in a directory, itself included, each before those below it.
fn sections(root: &Path) -> Result<Vec<Section>, ExperimentError> {
    let (mut sections, mut seen) = (Vec::new(), BTreeSet::new());
    let mut left = vec![root.to_owned()];
    while let Some(folder) = left.pop() {
        // Links may lead to a folder a second time, or round in a circle.
        if !seen.insert(folder.canonicalize().map_err(|error| read(&folder, error.to_string()))?) {
            continue;
        }
        if seen.len() > MAX_FOLDERS {
            return Err(read(
                root,
                format!("more than {MAX_FOLDERS} folders, allowed: a directory that tilewire wrote"),
            ));
        }
        left.extend(entries(&folder)?.into_iter().rev().filter(|path| path.is_dir()));
        let file = folder.join("run.toml");
        if file.exists() {
            let manifest: toml::Table = text(&file)?
                .parse()
                .map_err(|error: toml::de::Error| read(&file, error.message().replace('\n', " ")))?;
            let schema = manifest.get("schema").and_then(toml::Value::as_integer);
            if schema != Some(i64::from(SCHEMA)) {
                let is = manifest.get("schema").map_or_else(|| "missing".into(), said);
                return Err(read(&file, format!("schema is {is}, allowed: {SCHEMA}, which this version writes")));
            }
            let below = folder.strip_prefix(root).unwrap_or(&folder).display().to_string();
            let name = if below.is_empty() { root_name(root) } else { below };
            sections.push(Section { name, folder, manifest });
        }
    }
    if sections.is_empty() {
        return Err(read(root, "no run.toml here or below, allowed: a directory that tilewire wrote".into()));
    }
    Ok(sections)
}

/// What the section of the directory itself is called.
fn root_name(root: &Path) -> String {
    root.file_name().map_or_else(|| ".".into(), |name| name.to_string_lossy().into_owned())
}

/// The entries of a directory in the order of their names.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, ExperimentError> {
    let list = fs::read_dir(folder).and_then(|entries| entries.map(|e| e.map(|e| e.path())).collect());
    let mut paths: Vec<PathBuf> = list.map_err(|error| read(folder, error.to_string()))?;
    paths.sort();
    Ok(paths)
}

fn read(path: &Path, message: String) -> ExperimentError {
    ExperimentError::Read { file: path.to_owned(), message }
}

fn text(path: &Path) -> Result<String, ExperimentError> {
    read_text(path).map_err(|message| read(path, message))
}

impl Section {
    fn html(&self) -> Result<String, ExperimentError> {
        let mut html = format!("<h2 id=\"{0}\">{0}</h2>\n", escaped(&self.name));
        let experiment = self.folder.join("experiment.toml");
        if experiment.exists() {
            let experiment = text(&experiment)?;
            if let Some(question) =
                experiment.parse::<toml::Table>().ok().as_ref().and_then(|t| t.get("question")?.as_str())
            {
                let _ = writeln!(html, "<p><em>{}</em></p>", escaped(question));
            }
            let _ =
                writeln!(html, "<details><summary>experiment</summary><pre>{}</pre></details>", escaped(&experiment));
        }
        html += "<dl>\n";
        // The files are shown themselves.
        for (key, value) in self.manifest.iter().filter(|(key, _)| *key != "files") {
            let _ = writeln!(html, "<dt>{}</dt><dd>{}</dd>", escaped(key), escaped(&said(value)));
        }
        html += "</dl>\n";
        for path in entries(&self.folder)?.into_iter().filter(|path| path.is_file()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("svg") => {
                    let svg = text(&path)?;
                    // Only the element belongs into a page, not what XML says before it.
                    let start = svg.find("<svg").ok_or_else(|| read(&path, "no <svg> element in it".into()))?;
                    let _ = writeln!(html, "<h3>{}</h3>\n{}", escaped(&name), &svg[start..]);
                }
                Some("csv") => {
                    let _ = writeln!(html, "<h3>{}</h3>\n{}", escaped(&name), table(&path)?);
                }
                _ => {}
            }
        }
        Ok(html)
    }
}

/// A value of `run.toml` in words.
fn said(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Array(values) => values.iter().map(said).collect::<Vec<_>>().join(", "),
        toml::Value::Table(table) => {
            table.iter().map(|(key, value)| format!("{key}: {}", said(value))).collect::<Vec<_>>().join("; ")
        }
        other => other.to_string(),
    }
}

/// A CSV as a table, cut after [`SHOWN`] rows.
fn table(path: &Path) -> Result<String, ExperimentError> {
    let sheet = Sheet::read(path)?;
    let mut html = "<div class=\"wide\"><table><tr>".to_owned();
    for name in &sheet.columns {
        let _ = write!(html, "<th>{}</th>", escaped(name));
    }
    html += "</tr>\n";
    for row in sheet.rows.iter().take(SHOWN) {
        html += "<tr>";
        for field in &row.fields {
            let class = if field.parse::<f64>().is_ok() { " class=\"n\"" } else { "" };
            let _ = write!(html, "<td{class}>{}</td>", escaped(field));
        }
        html += "</tr>\n";
    }
    html += "</table></div>\n";
    let more = sheet.rows.len().saturating_sub(SHOWN);
    if more > 0 {
        let _ = writeln!(html, "<p>and {more} more rows in the file</p>");
    }
    Ok(html)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(csv: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let section = dir.path().join("a<b");
        fs::create_dir(&section).expect("writable");
        let write = |name: &str, text: &str| fs::write(section.join(name), text).expect("writable");
        write("run.toml", "schema = 1\ncommand = \"sweep\"\nmachines = [\"x\", \"y\"]\n");
        write("experiment.toml", "question = \"1 < 2?\"\n");
        write("rows.csv", csv);
        write("time.svg", "<?xml version=\"1.0\"?>\n<svg><text>plot</text></svg>");
        dir
    }

    fn report(dir: &tempfile::TempDir) -> Result<String, ExperimentError> {
        run(&ReportArgs { folder: dir.path().to_owned(), output: None })?;
        Ok(fs::read_to_string(dir.path().join("report.html")).expect("written"))
    }

    #[test]
    fn a_page_holds_plots_tables_and_what_made_them() {
        let rows: Vec<String> = (0..SHOWN + 2).map(|row| format!("k&{row},{row}\n")).collect();
        let dir = folder(&format!("kernel,time_us\n{}", rows.concat()));
        let page = report(&dir).expect("a page");
        for part in [
            "<h2 id=\"a&lt;b\">",
            "<em>1 &lt; 2?</em>",
            "<dt>machines</dt><dd>x, y</dd>",
            "<td>k&amp;0</td><td class=\"n\">0</td>",
            "and 2 more rows",
            "<svg><text>plot</text></svg>",
        ] {
            assert!(page.contains(part), "{part} is missing in {page}");
        }
        assert!(!page.contains("<?xml") && !page.contains(&format!("k&amp;{SHOWN}<")));
        assert_eq!(page, report(&dir).expect("a page"));
    }

    #[test]
    fn what_is_no_output_is_refused_and_nothing_written() {
        let ragged = folder("kernel,time_us\na\n");
        let error = report(&ragged).expect_err("a ragged row").to_string();
        assert!(error.contains("rows.csv:2: 1 fields, the header has 2: column \"time_us\" is missing"), "{error}");
        assert!(!ragged.path().join("report.html").exists());
        let other = folder("a\n");
        fs::write(other.path().join("a<b/run.toml"), "schema = 2\n").expect("writable");
        let error = report(&other).expect_err("another schema").to_string();
        assert!(error.contains("run.toml: schema is 2, allowed: 1,"), "{error}");
        let empty = tempfile::tempdir().expect("a temporary directory");
        let error = report(&empty).expect_err("no run.toml");
        assert!(error.to_string().contains("allowed: a directory that tilewire wrote"), "{error}");
        assert_eq!(error.exit_code(), 2);
    }
}
