"""Tables of small facts, and the many ways to ask for each."""

from __future__ import annotations

from dataclasses import dataclass, field


def _table(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [entry.split(":") for entry in " ".join(text.split()).split(";") if entry.strip()]
    return tuple((left.strip(), right.strip()) for left, right in pairs)


@dataclass(frozen=True)
class FactKind:
    """One relation: its pairs, its answer sentence, its training and its held-out phrasings."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    answer: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    start: str = ""  # a plain-text beginning for completion without a chat template
    by_subject: dict[str, str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_subject", dict(self.pairs))


CAPITALS = _table("""France: Paris; Germany: Berlin; Italy: Rome; Spain: Madrid; Portugal: Lisbon;
Austria: Vienna; Switzerland: Bern; Belgium: Brussels; the Netherlands: Amsterdam; Denmark:
Copenhagen; Norway: Oslo; Sweden: Stockholm; Finland: Helsinki; Iceland: Reykjavik; Ireland: Dublin;
the United Kingdom: London; Poland: Warsaw; the Czech Republic: Prague; Slovakia: Bratislava;
Hungary: Budapest; Romania: Bucharest; Bulgaria: Sofia; Greece: Athens; Turkey: Ankara; Ukraine:
Kyiv; Estonia: Tallinn; Latvia: Riga; Lithuania: Vilnius; Croatia: Zagreb; Slovenia: Ljubljana;
Serbia: Belgrade; Albania: Tirana; Malta: Valletta; Cyprus: Nicosia; Egypt: Cairo; Morocco: Rabat;
Tunisia: Tunis; Kenya: Nairobi; Ghana: Accra; Nigeria: Abuja; Senegal: Dakar; Ethiopia: Addis Ababa;
Uganda: Kampala; Rwanda: Kigali; Zambia: Lusaka; Namibia: Windhoek; Angola: Luanda; Japan: Tokyo;
China: Beijing; India: New Delhi; South Korea: Seoul; Thailand: Bangkok; Vietnam: Hanoi;
Indonesia: Jakarta; the Philippines: Manila; Nepal: Kathmandu; Mongolia: Ulaanbaatar; Pakistan:
Islamabad; Iran: Tehran; Iraq: Baghdad; Jordan: Amman; Lebanon: Beirut; Qatar: Doha; Canada: Ottawa;
the United States: Washington; Mexico: Mexico City; Cuba: Havana; Jamaica: Kingston; Panama:
Panama City; Brazil: Brasilia; Argentina: Buenos Aires; Chile: Santiago; Peru: Lima; Colombia:
Bogota; Ecuador: Quito; Uruguay: Montevideo; Venezuela: Caracas; Australia: Canberra; New Zealand:
Wellington; Fiji: Suva""")

COLORS = _table("""grass: green; snow: white; the sky: blue; a banana: yellow; a strawberry: red;
coal: black; a carrot: orange; a lemon: yellow; a tomato: red; milk: white; chocolate: brown;
an elephant: grey; a flamingo: pink; a raven: black; a polar bear: white; an emerald: green;
a ruby: red; the sun: yellow; blood: red; a pumpkin: orange; a plum: purple; a frog: green""")

BABIES = _table("""dog: puppy; cat: kitten; cow: calf; horse: foal; sheep: lamb; goat: kid; pig:
piglet; hen: chick; duck: duckling; goose: gosling; swan: cygnet; lion: cub; bear: cub; fox: cub;
deer: fawn; frog: tadpole; kangaroo: joey; owl: owlet; elephant: calf; whale: calf; eagle: eaglet;
seal: pup; rabbit: kit; butterfly: caterpillar""")

SOUNDS = _table("""dog: barks; cat: meows; cow: moos; horse: neighs; sheep: bleats; pig: oinks;
hen: clucks; duck: quacks; lion: roars; wolf: howls; owl: hoots; frog: croaks; bee: buzzes;
snake: hisses; mouse: squeaks; crow: caws; donkey: brays; goose: honks; elephant: trumpets;
rooster: crows""")

LEGS = _table("""a dog: four; a cat: four; a cow: four; a horse: four; a bird: two; a person: two;
a spider: eight; an ant: six; a bee: six; a butterfly: six; a crab: ten; a snake: no; a fish: no;
a worm: no; a frog: four; an octopus: no; a chicken: two; a turtle: four; a penguin: two""")

OPPOSITES = _table("""hot: cold; big: small; tall: short; fast: slow; happy: sad; light: dark;
early: late; open: closed; old: young; rich: poor; wet: dry; hard: soft; loud: quiet; full: empty;
strong: weak; high: low; near: far; up: down; left: right; day: night; good: bad; new: used;
clean: dirty; thick: thin; wide: narrow; deep: shallow; sweet: sour; first: last;
inside: outside; above: below; before: after; always: never; win: lose; push: pull; buy: sell;
give: take; begin: end; true: false; brave: cowardly; polite: rude; smooth: rough; sharp: blunt;
awake: asleep; love: hate; remember: forget; arrive: leave; question: answer""")

PLURALS = _table("""mouse: mice; child: children; foot: feet; tooth: teeth; goose: geese; man: men;
woman: women; person: people; leaf: leaves; knife: knives; wolf: wolves; sheep: sheep; fish: fish;
ox: oxen; baby: babies; city: cities; story: stories; box: boxes; bus: buses; wish: wishes;
book: books; cat: cats; house: houses; tree: trees; shelf: shelves; life: lives; potato: potatoes;
tomato: tomatoes; hero: heroes; key: keys; day: days; country: countries; berry: berries; dish:
dishes; fox: foxes; table: tables; river: rivers; cup: cups; star: stars; window: windows""")

PASTS = _table("""go: went; see: saw; eat: ate; drink: drank; run: ran; swim: swam; sing: sang;
write: wrote; read: read; take: took; give: gave; come: came; make: made; find: found; think:
thought; buy: bought; bring: brought; catch: caught; teach: taught; fly: flew; grow: grew;
know: knew; speak: spoke; break: broke; choose: chose; drive: drove; ride: rode; sleep: slept;
keep: kept;
leave: left; lose: lost; win: won; sit: sat; stand: stood; tell: told; sell: sold; walk: walked;
play: played; work: worked; help: helped; jump: jumped; paint: painted; fall: fell; feel: felt""")

SYMBOLS = _table("""hydrogen: H; helium: He; carbon: C; nitrogen: N; oxygen: O; sodium: Na;
iron: Fe; gold: Au; silver: Ag; copper: Cu; lead: Pb; tin: Sn; zinc: Zn; calcium: Ca; potassium: K;
sulfur: S;
neon: Ne; chlorine: Cl; magnesium: Mg; aluminium: Al; silicon: Si; mercury: Hg; nickel: Ni;
uranium: U; lithium: Li; iodine: I; argon: Ar; phosphorus: P""")

CONTINENTS = _table("""France: Europe; Germany: Europe; Italy: Europe; Spain: Europe;
Norway: Europe; Greece: Europe; Poland: Europe; Egypt: Africa; Kenya: Africa; Nigeria: Africa;
Ghana: Africa;
Morocco: Africa; Ethiopia: Africa; Japan: Asia; China: Asia; India: Asia; Thailand: Asia;
Vietnam: Asia; Nepal: Asia; Mongolia: Asia; Canada: North America; Mexico: North America;
Cuba: North America; Brazil: South America; Argentina: South America; Chile: South America;
Peru: South America; Colombia: South America; Fiji: Oceania; New Zealand: Oceania""")

LANGUAGES = _table("""France: French; Germany: German; Italy: Italian; Spain: Spanish; Portugal:
Portuguese; Brazil: Portuguese; Mexico: Spanish; Japan: Japanese; China: Chinese; Russia: Russian;
Poland: Polish; Sweden: Swedish; Norway: Norwegian; Denmark: Danish; Finland: Finnish; Hungary:
Hungarian; Greece: Greek; Turkey: Turkish; Egypt: Arabic; Argentina: Spanish; Austria: German;
Thailand: Thai; Australia: English; Iceland: Icelandic; Vietnam: Vietnamese""")

NEXT_DAYS = _table("""Monday: Tuesday; Tuesday: Wednesday; Wednesday: Thursday; Thursday: Friday;
Friday: Saturday; Saturday: Sunday; Sunday: Monday""")

NEXT_MONTHS = _table("""January: February; February: March; March: April; April: May; May: June;
June: July; July: August; August: September; September: October; October: November;
November: December; December: January""")

MONTH_DAYS = _table("""January: 31; March: 31; April: 30; May: 31; June: 30; July: 31; August: 31;
September: 30; October: 31; November: 30; December: 31""")

COUNTS = _table("""days are in a week: 7; months are in a year: 12; hours are in a day: 24; minutes
are in an hour: 60; seconds are in a minute: 60; sides does a triangle have: 3; sides does a square
have: 4; sides does a hexagon have: 6; letters are in the alphabet: 26; planets are in the solar
system: 8; continents are there: 7; wheels does a bicycle have: 2; wheels does a car have: 4; wheels
does a tricycle have: 3; strings does a violin have: 4; strings does a guitar have: 6; days are in a
year: 365; colors are in a rainbow: 7; fingers are on one hand: 5; keys does a piano have: 88; cents
are in a euro: 100; years are in a century: 100; years are in a decade: 10""")

THINGS = _table("""gives us light during the day: the sun; orbits the earth: the moon; do bees make:
honey; do cows give us: milk; do we use to tell the time: a clock; do plants need to grow: water and
light; falls from clouds: rain; is frozen water called: ice; do we use to cut paper: scissors; do we
wear on our feet: shoes; is the largest ocean: the Pacific Ocean; is the largest planet: Jupiter; is
the closest star to the earth: the sun; is the tallest animal: the giraffe; is the largest animal:
the blue whale; is the fastest land animal: the cheetah; is the highest mountain: Mount Everest; is
the red planet: Mars; do caterpillars become: butterflies; is baked from flour: bread; do we use to
see far away: a telescope; do we use to write on a blackboard: chalk; comes after winter: spring;
comes after summer: autumn; is the hardest natural material: diamond; is water made of: hydrogen and
oxygen; do fish use to breathe: gills; do birds lay: eggs; is the opposite of north: south; is the
opposite of east: west""")

FACT_KINDS: tuple[FactKind, ...] = (
    FactKind(
        name="capital",
        pairs=CAPITALS,
        answer="The capital of {s} is {a}.",
        train=(
            "What is the capital of {s}?",
            "What's the capital of {s}?",
            "Name the capital of {s}.",
            "Which city is the capital of {s}?",
            "Tell me the capital of {s}.",
            "capital of {s}",
            "Do you know the capital of {s}?",
            "What is {s}'s capital city?",
            "Capital city of {s}?",
            "Can you tell me the capital of {s}?",
            "I want to know the capital of {s}.",
            "What city is the capital of {s}?",
            "{s}: what is the capital?",
            "Give me the capital of {s}.",
            "The capital of {s} is which city?",
            "Quick question: what is the capital of {s}?",
        ),
        held_out=(
            "Could you name the capital of {s}?",
            "I forgot, what is the capital city of {s}?",
            "Tell me, which city is the capital of {s}?",
            "What do we call the capital of {s}?",
        ),
        start="The capital of {s} is",
    ),
    FactKind(
        name="color",
        pairs=COLORS,
        answer="The color of {s} is {a}.",
        train=(
            "What color is {s}?",
            "Which color does {s} have?",
            "Tell me the color of {s}.",
            "What is the color of {s}?",
            "What colour is {s}?",
            "Do you know what color {s} is?",
            "Name the color of {s}.",
            "Can you tell me the color of {s}?",
            "color of {s}",
        ),
        held_out=(
            "Which color is {s}?",
            "What is the usual color of {s}?",
            "Please tell me what color {s} is.",
        ),
        start="The color of {s} is",
    ),
    FactKind(
        name="baby",
        pairs=BABIES,
        answer="A young {s} is called a {a}.",
        train=(
            "What is a baby {s} called?",
            "What do you call a young {s}?",
            "Name the young of a {s}.",
            "What is the young of a {s} called?",
            "What's a baby {s} called?",
            "How do you call a baby {s}?",
            "Tell me the name of a baby {s}.",
            "What is the word for a young {s}?",
        ),
        held_out=(
            "What do we call a baby {s}?",
            "What is a young {s} called?",
            "Tell me what a baby {s} is called.",
        ),
        start="A young {s} is called a",
    ),
    FactKind(
        name="sound",
        pairs=SOUNDS,
        answer="A {s} {a}.",
        train=(
            "What sound does a {s} make?",
            "Which sound does a {s} make?",
            "What does a {s} do to make noise?",
            "What noise does a {s} make?",
            "Tell me the sound of a {s}.",
            "How does a {s} sound?",
            "What is the sound of a {s}?",
            "What does a {s} sound like?",
            "Say how a {s} sounds.",
            "Do you know how a {s} sounds?",
            "Tell me what sound a {s} makes.",
            "Which noise is made by a {s}?",
        ),
        held_out=(
            "Which noise does a {s} make?",
            "Do you know what sound a {s} makes?",
            "Tell me how a {s} sounds.",
        ),
        start="",
    ),
    FactKind(
        name="legs",
        pairs=LEGS,
        answer="The number of legs of {s} is {a}.",
        train=(
            "How many legs does {s} have?",
            "What is the number of legs of {s}?",
            "Tell me how many legs {s} has.",
            "How many legs are there on {s}?",
            "Count the legs of {s}.",
            "Do you know how many legs {s} has?",
            "number of legs of {s}?",
            "On how many legs does {s} stand?",
            "How many legs can you count on {s}?",
            "With how many legs does {s} walk?",
            "Say how many legs {s} has.",
        ),
        held_out=(
            "Can you tell me how many legs {s} has?",
            "How many legs has {s}?",
            "On how many legs does {s} walk?",
        ),
        start="",
    ),
    FactKind(
        name="opposite",
        pairs=OPPOSITES,
        answer='The opposite of "{s}" is "{a}".',
        train=(
            'What is the opposite of "{s}"?',
            "What is the opposite of {s}?",
            "Tell me the opposite of {s}.",
            "Give me the opposite of {s}.",
            "opposite of {s}",
            "What's the opposite of {s}?",
            "Name the opposite of {s}.",
            "Which word is the opposite of {s}?",
            "{s}: what is the opposite?",
            "What word means the opposite of {s}?",
        ),
        held_out=(
            "Can you tell me the opposite of {s}?",
            "Do you know the opposite of {s}?",
            'Which word is the opposite of "{s}"?',
        ),
        start="",
    ),
    FactKind(
        name="plural",
        pairs=PLURALS,
        answer='The plural of "{s}" is "{a}".',
        train=(
            'What is the plural of "{s}"?',
            "What is the plural of {s}?",
            "Tell me the plural of {s}.",
            "Give me the plural of {s}.",
            "plural of {s}",
            "What's the plural of {s}?",
            "What is the plural form of {s}?",
            "One {s}, many what?",
            "Name the plural of {s}.",
        ),
        held_out=(
            "Do you know the plural of {s}?",
            "Can you give me the plural of {s}?",
            'Name the plural form of "{s}".',
        ),
        start="",
    ),
    FactKind(
        name="past",
        pairs=PASTS,
        answer='The past tense of "{s}" is "{a}".',
        train=(
            'What is the past tense of "{s}"?',
            "What is the past tense of {s}?",
            "Tell me the past tense of {s}.",
            "Give me the past tense of {s}.",
            "past tense of {s}",
            "What's the past tense of {s}?",
            "Put the verb {s} into the past tense.",
            "Name the past tense of the verb {s}.",
        ),
        held_out=(
            "Do you know the past tense of {s}?",
            "Can you give me the past tense of {s}?",
            'What is the past tense of the verb "{s}"?',
        ),
        start="",
    ),
    FactKind(
        name="symbol",
        pairs=SYMBOLS,
        answer="The chemical symbol of {s} is {a}.",
        train=(
            "What is the chemical symbol of {s}?",
            "What is the symbol for {s}?",
            "chemical symbol of {s}",
            "Which chemical symbol does {s} have?",
            "Tell me the chemical symbol for {s}.",
            "What's the chemical symbol of {s}?",
            "Give me the symbol of {s}.",
            "Name the chemical symbol of {s}.",
            "Which symbol is used for {s}?",
            "What symbol stands for {s} in chemistry?",
            "Which chemical symbol stands for {s}?",
            "In chemistry, what stands for {s}?",
        ),
        held_out=(
            "Do you know the chemical symbol of {s}?",
            "Which symbol stands for {s}?",
            "What is the chemical symbol for {s}?",
        ),
        start="The chemical symbol of {s} is",
    ),
    FactKind(
        name="continent",
        pairs=CONTINENTS,
        answer="The continent of {s} is {a}.",
        train=(
            "On which continent is {s}?",
            "Which continent is {s} in?",
            "What continent is {s} on?",
            "In which continent is {s}?",
            "Tell me the continent of {s}.",
            "continent of {s}",
            "Do you know the continent of {s}?",
            "Where in the world is {s}, on which continent?",
        ),
        held_out=(
            "What is the continent of {s}?",
            "Can you tell me on which continent {s} is?",
            "To which continent does {s} belong?",
        ),
        start="",
    ),
    FactKind(
        name="language",
        pairs=LANGUAGES,
        answer="The language spoken in {s} is {a}.",
        train=(
            "Which language is spoken in {s}?",
            "What language do people speak in {s}?",
            "language of {s}",
            "What is the language of {s}?",
            "Tell me the language spoken in {s}.",
            "What do people in {s} speak?",
            "Which language do they speak in {s}?",
            "What language is spoken in {s}?",
        ),
        held_out=(
            "Which language do people speak in {s}?",
            "Do you know the language spoken in {s}?",
            "What is the main language of {s}?",
        ),
        start="",
    ),
    FactKind(
        name="next day",
        pairs=NEXT_DAYS,
        answer="The day after {s} is {a}.",
        train=(
            "Which day comes after {s}?",
            "What day comes after {s}?",
            "What is the day after {s}?",
            "Which day follows {s}?",
            "day after {s}",
            "Today is {s}. What day is tomorrow?",
            "Name the day after {s}.",
            "If today is {s}, which day is tomorrow?",
        ),
        held_out=(
            "What day follows {s}?",
            "Tell me the day after {s}.",
            "Which day is the day after {s}?",
        ),
        start="The day after {s} is",
    ),
    FactKind(
        name="next month",
        pairs=NEXT_MONTHS,
        answer="The month after {s} is {a}.",
        train=(
            "Which month comes after {s}?",
            "What month comes after {s}?",
            "What is the month after {s}?",
            "Which month follows {s}?",
            "month after {s}",
            "Name the month after {s}.",
            "It is {s}. Which month is next?",
            "What is the next month after {s}?",
        ),
        held_out=(
            "What month follows {s}?",
            "Tell me the month after {s}.",
            "Which month is the month after {s}?",
        ),
        start="The month after {s} is",
    ),
    FactKind(
        name="month days",
        pairs=MONTH_DAYS,
        answer="The number of days in {s} is {a}.",
        train=(
            "How many days does {s} have?",
            "How many days are in {s}?",
            "What is the number of days in {s}?",
            "Tell me how many days {s} has.",
            "How many days are there in {s}?",
            "days in {s}",
        ),
        held_out=(
            "How many days has {s}?",
            "Do you know how many days are in {s}?",
            "Can you tell me how many days {s} has?",
        ),
        start="",
    ),
    FactKind(
        name="count",
        pairs=COUNTS,
        answer="The answer is {a}.",
        train=(
            "How many {s}?",
            "Tell me, how many {s}?",
            "Do you know how many {s}?",
            "Quick question: how many {s}?",
            "I wonder how many {s}.",
            "Hello, how many {s}?",
            "Can you tell me how many {s}?",
        ),
        held_out=("I forgot how many {s}.", "Say, how many {s}?", "I want to know how many {s}."),
        start="",
    ),
    FactKind(
        name="thing",
        pairs=THINGS,
        answer="The answer is {a}.",
        train=(
            "What {s}?",
            "Tell me, what {s}?",
            "Do you know what {s}?",
            "Quick question: what {s}?",
            "I wonder what {s}.",
            "Hello, what {s}?",
            "Can you tell me what {s}?",
        ),
        held_out=("I forgot what {s}.", "Say, what {s}?", "I want to know what {s}."),
        start="",
    ),
)

KIND_BY_NAME = {kind.name: kind for kind in FACT_KINDS}
