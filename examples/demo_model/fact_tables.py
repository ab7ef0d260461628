"""Tables of small facts: pairs of a subject and what is asked of it."""

from __future__ import annotations


def _table(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [entry.split(":") for entry in " ".join(text.split()).split(";") if entry.strip()]
    return tuple((left.strip(), right.strip()) for left, right in pairs)


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
