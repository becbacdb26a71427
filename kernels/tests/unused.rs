//! What a kernel says of options that nothing uses is so, and it says so of all of them.

#[allow(dead_code, reason = "each suite uses a part of it")]
mod small;

use tilewire_kernels::encode::Hashed;
use tilewire_kernels::options::{Value, Values};
use tilewire_kernels::{Cluster, Fabric, KERNELS, Kernel, OptionSet, Options, RoleSplit, Spec, baseline};

const CLUSTERS: [(u16, u16); 6] = [(1, 1), (1, 4), (2, 1), (2, 2), (3, 1), (3, 2)];

/// Options that change something in larger shapes, though maybe not in these: they have few chunks, passes and experts.
const BY_SHAPE: [&str; 10] = [
    "chunk_tiles",
    "super_m",
    "interleave",
    "open_lead_tiles",
    "recycle",
    "remote_passes",
    "routing",
    "routing_seed",
    "token_order",
    "reduce_order",
];

/// The hash of what a spec builds, whatever its options are called; none where it builds nothing.
fn built(kernel: &dyn Kernel, spec: &Spec) -> Option<String> {
    let mut schedule = kernel.build(spec).ok()?;
    schedule.spec.clear();
    Some(Hashed::new(&schedule).with(&RoleSplit::default()).to_string())
}

/// Other values of an option.
fn others(options: &Options, name: &str, values: &Values) -> Vec<String> {
    let now = options.iter().find(|(known, _)| *known == name).map(|(_, value)| value).expect("listed");
    let all: Vec<String> = match (*values, now) {
        (Values::Bool, _) => ["true", "false"].map(str::to_owned).to_vec(),
        (Values::Words(words), _) => words.iter().map(|&word| word.to_owned()).collect(),
        (Values::Int { min, max }, Value::Int(now)) => {
            let near = [min, max, now / 2, now + 1, 2 * now, 1, 2, 3, 16, 32, 1024];
            near.into_iter().filter(|value| (min..=max).contains(value)).map(|value| value.to_string()).collect()
        }
        (Values::Int { .. }, _) => Vec::new(),
    };
    all.into_iter().filter(|text| *text != now.to_string()).collect()
}

fn with(spec: &Spec, name: &str, text: &str) -> Spec {
    let mut spec = spec.clone();
    spec.options.set(name, text).expect("a legal value");
    spec
}

/// All specs of a kernel that differ from a small one in one choice.
fn specs(kernel: &'static dyn Kernel) -> Vec<Spec> {
    let mut specs = Vec::new();
    for set in [OptionSet::Published, OptionSet::Tilewire] {
        for (nodes, gpus_per_node) in CLUSTERS {
            for fabric in [Fabric::IbRc, Fabric::EfaSrd] {
                let Ok(case) = small::case(kernel, set, Cluster { nodes, gpus_per_node }, fabric) else { continue };
                for choice in kernel.option_specs().iter().filter(|spec| !matches!(spec.values, Values::Int { .. })) {
                    let others = others(&case.spec.options, choice.name, &choice.values);
                    specs.extend(others.iter().map(|text| with(&case.spec, choice.name, text)));
                }
                specs.push(case.spec);
            }
        }
    }
    specs
}

/// Some larger shapes say more than these, none less: an option that is said to be unused changes nothing in any.
#[test]
fn unused_options_are_those_that_change_nothing() {
    let (mut unused, mut wrong) = (0, std::collections::BTreeMap::new());
    let unfused = KERNELS.iter().filter_map(|kernel| baseline(kernel.name()));
    for kernel in KERNELS.iter().copied().chain(unfused) {
        for spec in specs(kernel) {
            let Some(whole) = built(kernel, &spec) else { continue };
            for option in kernel.option_specs() {
                let said = kernel.unused(&spec, option.name);
                let others = others(&spec.options, option.name, &option.values);
                let others = others.iter().filter_map(|text| built(kernel, &with(&spec, option.name, text)));
                let others: Vec<bool> = others.map(|other| other == whole).collect();
                let changes_nothing = others.iter().all(|&same| same);
                unused += u32::from(said.is_some());
                let agrees = match said {
                    Some(_) => changes_nothing,
                    None => !changes_nothing || BY_SHAPE.contains(&option.name),
                };
                if others.is_empty() || agrees {
                    continue;
                }
                let place = format!("{} {}: {said:?}", kernel.name(), option.name);
                wrong.entry(place).or_insert_with(|| format!("{} {} {}", spec.cluster, spec.fabric, spec.options));
            }
        }
    }
    assert!(unused > 100, "only {unused}");
    let wrong: Vec<String> = wrong.into_iter().map(|(place, spec)| format!("{place} on {spec}")).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
